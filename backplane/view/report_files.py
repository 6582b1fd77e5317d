"""The style and the script of a report's page: each is in it as it stands here, its hash in the page's policy."""

from __future__ import annotations

from typing import Final

CSS: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #57606a; --back: #fff; --box: #f6f8fa; --line: #d0d7de;
  --good: #1a6b32; --bad: #b3261e; --warn: #7a4d00; --add: #e6f6ea; --del: #fdecea; --accent: #0550ae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9aa5b1; --back: #0d1117; --box: #161b22;
  --line: #30363d; --good: #56d364; --bad: #ff7b72; --warn: #e3b341; --add: #12261a; --del: #2d1517;
  --accent: #79c0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--ink); background: var(--back);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; margin: .2rem 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
h1, .message { white-space: pre-wrap; }
pre, code, .mono { font: 13px/1.45 ui-monospace, monospace; }
pre { white-space: pre-wrap; background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .5rem;
  margin: .4rem 0; max-height: 32rem; overflow: auto; }
.two { display: grid; gap: 1.5rem; } @media (min-width: 60rem) { .two { grid-template-columns: 1fr 1fr; } }
.two + * { min-width: 0; } .run { min-width: 0; }
.chip { display: inline-block; border: 1px solid currentColor; border-radius: 1rem; padding: 0 .6rem;
  font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .dim { color: var(--dim); }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .6rem 0; }
.facts dt { color: var(--dim); } .facts dd { margin: 0; }
.row { border-left: 3px solid var(--line); padding: .1rem .6rem; margin: .25rem 0; content-visibility: auto;
  contain-intrinsic-size: auto 1.7rem; }
.row:target, .row:focus { outline: 2px solid var(--accent); }
.row.bad { border-left-color: var(--bad); color: inherit; }
.row.warn { border-left-color: var(--warn); color: inherit; }
summary { cursor: pointer; } .no { color: var(--dim); font-size: 12px; margin-right: .5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
caption { text-align: left; color: var(--dim); } th, td { text-align: left; vertical-align: top; padding: .2rem .5rem;
  border-bottom: 1px solid var(--line); }
.diff span { display: block; } .added { background: var(--add); } .removed { background: var(--del); }
.hunk, .meta { color: var(--dim); } .file { font-weight: 700; }
input[type=search] { width: 100%; padding: .4rem .6rem; font: inherit; color: inherit; background: var(--box);
  border: 1px solid var(--line); border-radius: 6px; }
.message code { background: var(--box); padding: 0 .15rem; } .message i { color: var(--dim); font-style: normal; }
svg.time { width: 100%; height: auto; max-height: 12rem; } svg rect.warn { fill: var(--warn); }
svg rect.bad { fill: var(--bad); } svg .curve { fill: none; stroke: var(--accent); stroke-width: 2; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg rect.call { fill: var(--accent); }
[hidden] { display: none !important; }
@media print { pre { max-height: none; } .screen { display: none; }
  details:not([open]) > :not(summary) { display: none; } }
"""

JS: Final = """
'use strict';
(function () {
  var search = document.getElementById('search'), count = document.getElementById('count');
  var rows = Array.prototype.slice.call(document.querySelectorAll('.row')), texts = null, timer = 0;
  function look() {
    var words = search.value.toLowerCase().split(/\\s+/).filter(Boolean), seen = 0;
    texts = texts || rows.map(function (row) { return row.textContent.toLowerCase(); });
    rows.forEach(function (row, i) {
      var fits = words.every(function (word) { return texts[i].indexOf(word) >= 0; });
      row.hidden = !fits; seen += fits;
    });
    count.textContent = words.length ? seen + ' of ' + rows.length + ' rows' : '';
  }
  search.addEventListener('input', function () { clearTimeout(timer); timer = setTimeout(look, 80); });
  document.addEventListener('keydown', function (event) {
    if (event.target === search) { if (event.key === 'Escape') { search.value = ''; look(); search.blur(); } return; }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === '/') { event.preventDefault(); search.focus(); return; }
    if (event.key !== 'j' && event.key !== 'k') return;
    var shown = rows.filter(function (row) { return !row.hidden; });
    var at = shown.indexOf(document.activeElement) + (event.key === 'j' ? 1 : -1);
    if (shown[at]) { shown[at].focus(); shown[at].scrollIntoView({ block: 'nearest' }); }
  });
})();
"""
