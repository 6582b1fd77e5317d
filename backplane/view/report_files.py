"""The style and the script of a report's page: each is in it as it stands here, its hash in the page's policy."""

from __future__ import annotations

import json
from typing import Final

from backplane.view.html import MARKS
from backplane.view.story import SILENT
from backplane.view.text import STAGED, UNPRINTABLE
from backplane.view.values import TELLING

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
button { font: inherit; padding: .3rem .8rem; color: var(--ink); background: var(--box); cursor: pointer;
  border: 1px solid var(--line); border-radius: 6px; }
svg.time { width: 100%; height: auto; max-height: 12rem; } svg rect.warn { fill: var(--warn); }
svg rect.bad { fill: var(--bad); } svg .curve { fill: none; stroke: var(--accent); stroke-width: 2; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg rect.call { fill: var(--accent); }
[hidden] { display: none !important; }
@media print { pre { max-height: none; } .screen { display: none; }
  details:not([open]) > :not(summary) { display: none; } }
"""

_SHARED: Final = {"ODD": UNPRINTABLE, "MARKS": MARKS, "STAGED": STAGED, "TELLING": TELLING, "SILENT": SILENT}
"""What the script draws by as this package does."""

JS: Final = """
'use strict';
(function () {
  var SHARED;
  var search = document.getElementById('search'), count = document.getElementById('count');
  var rows = Array.prototype.slice.call(document.querySelectorAll('.row'));
  var texts = null, rests = [], timer = 0;

  // Rows beyond those that are drawn come from the page's own copy of the receipt, a piece at a time, or where a
  // search finds them. Every text of it is set as text.
  function unpacked(id) {
    var packed = atob(document.getElementById(id).textContent.trim());
    var bytes = Uint8Array.from(packed, function (c) { return c.charCodeAt(0); });
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip')));
  }
  var odd = new RegExp(ODD, 'gu'), marks = new RegExp(MARKS, 'gu'), staged = new RegExp(STAGED, 'g');
  function shown(value) {
    var text = typeof value === 'string' ? value : JSON.stringify(value, null, 2) || '';
    if (text.length > 4096) {
      var left = '\\n… ' + (text.length - 4096) + ' characters are left out …\\n';
      text = text.slice(0, 2048) + left + text.slice(-2048);
    }
    return text.replace(staged, function (all, within) { return within ? '' : '.'; }).replace(marks, '$1…')
      .replace(odd, function (c) { return '\\\\u' + c.codePointAt(0).toString(16).padStart(4, '0'); });
  }
  function el(name, text, kind) {
    var made = document.createElement(name);
    if (text) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }
  function words(output) {
    var first = Array.isArray(output) && output[0] && output[0].text;
    return output == null ? '' : typeof first === 'string' ? first : output;
  }
  function about(input) {
    var found = input && TELLING.find(function (name) { return typeof input[name] === 'string'; });
    return (found ? input[found] : JSON.stringify(input) || '').slice(0, 200);
  }
  var says = {
    assistant_message: function (e) { return { head: e.text, kind: 'message' }; },
    tool_call: function (e) { return { head: e.tool_name + ' ' + about(e.input), body: [e.input || ''] }; },
    tool_result: function (e) { return { head: e.tool_name, body: [] }; },
    command_executed: function (e) {
      var end = e.exit_code == null ? 'ended by a signal' : 'exit ' + e.exit_code;
      return { head: e.command + '  ' + end, body: [e.output_preview || ''], kind: e.exit_code === 0 ? '' : 'bad' };
    },
    file_changed: function (e) { return { head: 'file ' + e.path + ' ' + e.summary }; },
    error: function (e) { return { head: e.message, kind: 'bad' }; },
    run_started: function (e) { return { head: e.message }; },
    run_completed: function (e) { return { head: e.message }; },
    warning: function (e) {
      var quiet = SILENT.some(function (name) { return e.ext && name in e.ext; });
      return quiet ? null : { head: e.message, kind: e.ext && e.ext.ask ? 'warn' : 'dim' };
    }
  };
  function rowsOf(trace, drawnEvents) {
    var calls = new Map(), found = [];
    trace.forEach(function (e, at) {
      var id = e.tool_use_id || e.tool_name, call = e.type === 'tool_result' ? calls.get(id) : undefined;
      var row = call === undefined && says[e.type] ? says[e.type](e) : null, beyond = at >= drawnEvents;
      if (row) row.number = at + 1;
      if (e.type === 'tool_call') calls.set(id, beyond ? row : null);
      if (e.type === 'tool_result') {
        calls.delete(id);
        var told = call || row;
        if (told) {
          told.head += e.is_error ? '  failed' : '  done';
          told.body.push(words(e.output));
          if (e.is_error) told.kind = 'bad';
        }
      }
      if (row && beyond) found.push(row);
    });
    return found;
  }
  function drawn(told, into) {
    var row = el('div', '', 'row ' + (told.kind || '')), head = [el('span', told.number, 'no mono')];
    head.push(el('span', shown(told.head), told.kind === 'message' ? 'message' : told.kind));
    var texts = (told.body || []).map(shown).filter(function (text) { return text.trim() && text !== '{}'; });
    var within = texts.length ? row.appendChild(el('details')) : row, top = texts.length ? el('summary') : row;
    head.forEach(function (part) { top.appendChild(part); });
    if (top !== row) within.appendChild(top);
    texts.forEach(function (text) { within.appendChild(el('pre', text)); });
    if (told.kind === 'bad' && texts.length) within.open = true;
    row.tabIndex = -1; into.appendChild(row); return row;
  }
  Array.prototype.forEach.call(document.querySelectorAll('[data-more]'), function (button) {
    var rest = { id: button.dataset.more, rows: null, at: 0, texts: null, found: [] };
    rests.push(rest);
    rest.load = function () {
      if (rest.rows) return Promise.resolve(rest);
      return unpacked(rest.id).json().then(function (receipt) {
        rest.rows = rowsOf(receipt.trace, Number(button.dataset.drawn)); return rest;
      });
    };
    button.addEventListener('click', function () {
      rest.load().then(function () {
        var into = document.getElementById(rest.id + '-rows'), end = Math.min(rest.at + 2000, rest.rows.length);
        for (; rest.at < end; rest.at++) rows.push(drawn(rest.rows[rest.at], into));
        texts = null; button.hidden = rest.at === rest.rows.length;
      }).catch(function (error) { count.textContent = 'this browser cannot unpack the rest: ' + error; });
    });
  });
  function packedHits(words) {
    var found = 0;
    rests.forEach(function (rest) {
      rest.found.forEach(function (row) { row.remove(); });
      rest.found = [];
      if (!rest.rows || !words.length) return;
      rest.texts = rest.texts || rest.rows.map(function (row) {
        return [row.head].concat((row.body || []).map(shown)).join(' ').toLowerCase();
      });
      var into = document.getElementById(rest.id + '-rows');
      for (var i = rest.at; i < rest.rows.length; i++) {
        if (!words.every(function (word) { return rest.texts[i].indexOf(word) >= 0; })) continue;
        found++;
        if (rest.found.length < 200) rest.found.push(drawn(rest.rows[i], into));
      }
    });
    return found;
  }
  function look() {
    var words = search.value.toLowerCase().split(/\\s+/).filter(Boolean), seen = 0;
    texts = texts || rows.map(function (row) { return row.textContent.toLowerCase(); });
    rows.forEach(function (row, i) {
      var fits = words.every(function (word) { return texts[i].indexOf(word) >= 0; });
      row.hidden = !fits; seen += fits;
    });
    Promise.all(rests.map(function (rest) { return words.length ? rest.load() : null; })).catch(function () {})
      .then(function () {
        var total = rows.length;
        rests.forEach(function (rest) { total += (rest.rows || []).length - rest.at; });
        seen += packedHits(words);
        count.textContent = words.length ? seen + ' of ' + total + ' rows' : '';
      });
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
  Array.prototype.forEach.call(document.querySelectorAll('[data-check]'), function (button) {
    var told = document.getElementById(button.dataset.check + '-told');
    button.addEventListener('click', function () {
      unpacked(button.dataset.check).arrayBuffer().then(function (data) {
        return crypto.subtle.digest('SHA-256', data);
      }).then(function (sum) {
        var hex = Array.from(new Uint8Array(sum), function (b) { return b.toString(16).padStart(2, '0'); }).join('');
        var same = hex === button.dataset.sealed;
        told.textContent = same ? 'intact: the copy in this page hashes to ' + hex : 'ALTERED: it hashes to ' + hex;
        told.className = same ? 'good' : 'bad';
      }).catch(function (error) { told.textContent = 'this browser cannot: ' + error; });
    });
  });
})();
""".replace("SHARED", ", ".join(f"{name} = {json.dumps(value)}" for name, value in _SHARED.items()))
