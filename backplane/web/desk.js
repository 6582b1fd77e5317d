'use strict';
(() => {
  // Every HTML that is put in here was made by the server, which escapes foreign texts.
  const $ = (id) => document.getElementById(id);
  const desk = $('desk'), list = $('list'), main = $('main'), run = $('run'), note = $('note');
  const fields = ['words', 'state'].map($);
  let token = sessionStorage.getItem('token') || '', title = '', waiting = 0;

  // The token: from the address, for a code, or from another tab of this desk.
  const given = /^#(token|code)=([\w-]+)$/.exec(location.hash);
  const tabs = new BroadcastChannel('token');
  function keep(words) { token = words; sessionStorage.setItem('token', words); go(); }
  tabs.onmessage = ({ data }) => {
    if (data === 'wanted') { if (token) tabs.postMessage({ token }); } else if (!token) keep(data.token);
  };

  async function ask(path, { body, key = `Bearer ${token}`, signal } = {}) {
    const how = { headers: { Authorization: key }, signal, cache: 'no-store' };
    if (body) {
      Object.assign(how, { method: 'POST', body: JSON.stringify(body) });
      how.headers['Content-Type'] = 'application/json';
    }
    const answer = await fetch(path, how);
    if (answer.ok) return answer;
    const { code = answer.status, message = answer.statusText, hint } = await answer.json().catch(() => ({}));
    throw new Error(`${code}: ${message}${hint ? ` — next: ${hint}` : ''}`);
  }
  function retitle() {
    document.title = `${waiting ? `(${waiting}) ` : ''}${title ? `${title} — ` : ''}backplane`;
  }

  const isGateway = () => /^\/gateway(\/|$)/.test(location.pathname);

  // The list: one loop. A new look ends the one before it, whose answer is dropped.
  let looks = null, timer = 0, isLost = false;
  function look(wait) {
    clearTimeout(timer);
    looks?.abort();
    const mine = looks = new AbortController();
    timer = setTimeout(async () => {
      try {
        const [text, state] = fields.map((field) => field.value);
        const answer = await ask(`/api/${isGateway() ? 'exchanges' : 'runs'}?${new URLSearchParams({ text, state })}`, { signal: mine.signal });
        const told = await answer.json();
        if (mine !== looks) return;
        if (isLost) note.textContent = '';
        isLost = false;
        draw(told);
      } catch (error) { if (mine === looks) { isLost = true; note.textContent = error.message; } }
      if (mine === looks) look(2000);
    }, wait);
  }
  let drawn = '';
  function draw({ html, waiting: waits, live }) {
    waiting = waits;
    retitle();
    const running = isGateway() ? live && `${live} open` : live - waits && `${live - waits} running`;
    $('counts').textContent = [waits && `${waits} waiting`, running]
      .filter(Boolean).join(' · ');
    if (html !== drawn) {
      const focused = list.contains(document.activeElement) ? document.activeElement.id : '';
      list.innerHTML = drawn = html;
      $(focused)?.focus({ preventScroll: true });
    }
    for (const link of list.querySelectorAll('a')) {
      link.setAttribute('aria-current', String(link.pathname === location.pathname));
    }
  }

  // One run: a stream of lines. A new stream ends the one before it.
  let stream = null, isOver = false;
  async function follow(id) {
    const mine = stream = new AbortController();
    while (mine === stream && !isOver) {
      try {
        const answer = await ask(`/api/run/${id}/rows`, { signal: mine.signal });
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = '';
        for (let part = await reader.read(); !part.done && mine === stream; part = await reader.read()) {
          const lines = (rest + part.value).split('\n');
          rest = lines.pop();
          lines.forEach((line) => take(JSON.parse(line)));
        }
      } catch (error) { if (mine === stream) note.textContent = error.message; }
      if (!isOver) await new Promise((done) => setTimeout(done, 1000));
    }
  }
  // One exchange of the gateway: it is asked for again until it has ended.
  async function poll(id) {
    const mine = stream = new AbortController();
    let before = '';
    while (mine === stream && !isOver) {
      try {
        const told = await (await ask(`/api/exchange/${id}`, { signal: mine.signal })).json();
        if (mine !== stream) return;
        if (told.html !== before) run.innerHTML = before = told.html;
        title = told.title; isOver = told.over;
        retitle();
      } catch (error) { if (mine === stream) note.textContent = error.message; }
      if (!isOver) await new Promise((done) => setTimeout(done, 1000));
    }
  }
  const section = (name) => run.querySelector(`:scope > [data-part="${name}"]`);
  function take(told) {
    const top = main.scrollTop, atEnd = top > 0 && main.scrollHeight - top - main.clientHeight < 60;
    if (told.names) {
      run.innerHTML = told.names.map((name) => `<section data-part="${name}"></section>`).join('');
      section('story').innerHTML = '<h2>What happened</h2><div class="rows"></div>';
    }
    for (const name in told) if (name.startsWith('part ')) section(name.slice(5)).innerHTML = told[name];
    if (told.asks) question(told.asks);
    if (told.title !== undefined) { title = told.title; retitle(); }
    if (told.says) $('said').textContent = told.says;
    for (const [at, html] of told.rows || []) put(section('story').lastElementChild, at, html);
    if (told.over) isOver = true;
    if (told.names) main.scrollTop = top; else if (atEnd && !told.over) main.scrollTop = main.scrollHeight;
  }
  function put(box, at, html) {
    const before = box.children[at];
    if (!before) { box.insertAdjacentHTML('beforeend', html); return; }
    const wasOpen = before.querySelector('details[open]');
    before.outerHTML = html;
    if (wasOpen) box.children[at].querySelector('details')?.setAttribute('open', '');
  }
  let askedAt = 0;
  function question(asks) {
    const box = section('asks'), there = new Map([...box.children].map((one) => [+one.dataset.ask, one]));
    for (const [number, html] of asks) {
      if (!there.delete(number)) { box.insertAdjacentHTML('beforeend', html); askedAt = performance.now(); }
    }
    there.forEach((one) => { one.remove(); askedAt = performance.now(); });
  }

  // What can be done.
  run.addEventListener('submit', async (event) => {
    event.preventDefault();
    const form = event.target, out = form.querySelector('output');
    const body = Object.fromEntries(new FormData(form, event.submitter));
    out.className = out.textContent = '';
    try {
      const answer = await ask(`/api${location.pathname}/${form.dataset.act}`, { body });
      out.textContent = (await answer.json()).done;
      look(0);
    } catch (error) { out.className = 'bad'; out.textContent = error.message; }
  });
  run.addEventListener('click', async ({ target }) => {
    if ('copy' in target.dataset) {
      await navigator.clipboard.writeText(target.dataset.copy);
      $('said').textContent = target.textContent = 'Copied';
    }
    if ('report' in target.dataset) {
      const link = document.createElement('a'), whole = await (await ask(`/api${location.pathname}/report`)).blob();
      link.href = URL.createObjectURL(whole);
      link.download = `run-${location.pathname.slice(5, 13)}.html`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    }
  });

  // Places
  const place = () => /^\/(run|gateway)\/([\w-]+)$/.exec(location.pathname) || [];
  function go() {
    const [, kind, id] = place();
    stream?.abort();
    stream = null; isOver = false; title = ''; note.textContent = '';
    run.replaceChildren();
    $('back').href = isGateway() ? '/gateway' : '/';
    for (const tab of document.querySelectorAll('#tabs a')) {
      tab.setAttribute('aria-current', (tab.pathname === '/gateway') === isGateway() ? 'page' : 'false');
    }
    desk.classList.toggle('open', Boolean(id));
    retitle();
    if (!token) {
      tabs.postMessage('wanted');
      note.textContent = 'Open the address that the terminal printed: it has the token.';
      return;
    }
    look(0);
    if (id) (kind === 'run' ? follow : poll)(id);
  }
  document.addEventListener('click', (event) => {
    const link = event.target.closest('a[href^="/"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    history.pushState(null, '', link.href);
    go();
  });
  addEventListener('popstate', go);
  document.addEventListener('visibilitychange', () => {  // A browser has six connections for one server.
    const [, kind, id] = place();
    if (document.hidden) { stream?.abort(); stream = null; } else if (token && id && !isOver && !stream) {
      (kind === 'run' ? follow : poll)(id);
    }
  });
  fields.forEach((field) => field.addEventListener('input', () => look(150)));
  $('filter').addEventListener('submit', (event) => event.preventDefault());

  // Keys
  $('to-help').onclick = () => $('help').showModal();
  $('close').onclick = () => $('help').close();
  function move(step) {
    const links = [...list.querySelectorAll('a')];
    const at = links.findIndex((one) => one === document.activeElement);
    const from = at < 0 ? links.findIndex((one) => one.getAttribute('aria-current') === 'true') : at;
    links[Math.min(Math.max(from + step, 0), links.length - 1)]?.focus();
  }
  function press(key) {  // Not a question that came under the fingers just now.
    if (performance.now() - askedAt > 500) run.querySelector(`.ask [data-key="${key}"]`)?.click();
  }
  document.addEventListener('keydown', (event) => {
    const inField = event.target.matches('input, select, textarea');
    if (event.key === 'Escape' && event.target.matches('input')) {
      event.target.value = '';
      event.target.blur();
      look(0);
    }
    if (inField || event.ctrlKey || event.metaKey || event.altKey || $('help').open) return;
    const keys = {
      j: () => move(1), k: () => move(-1), a: () => press('a'), d: () => press('d'),
      '/': () => $('words').focus(), '?': () => $('help').showModal(),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });

  if (given) history.replaceState(null, '', location.pathname);
  if (given?.[1] === 'token') keep(given[2]);
  else if (given) {
    ask('/api/token', { body: {}, key: `Code ${given[2]}` }).then((answer) => answer.json())
      .then((told) => keep(told.token), (error) => { note.textContent = error.message; });
  } else go();
})();
