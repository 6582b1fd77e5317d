'use strict';
(() => {
  const search = document.getElementById('search'), count = document.getElementById('count');
  const rows = [...document.querySelectorAll('.row')];
  let texts = null, timer = 0;
  function look() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    texts ??= rows.map((row) => row.textContent.toLowerCase());
    rows.forEach((row, at) => { row.hidden = !words.every((word) => texts[at].includes(word)); });
    count.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : '';
  }
  search.addEventListener('input', () => { clearTimeout(timer); timer = setTimeout(look, 80); });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && event.target === search) { search.value = ''; look(); search.blur(); }
    if (event.key !== '/' || event.target === search || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    search.focus();
  });
})();
