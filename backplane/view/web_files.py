"""The page of `backplane web`: its style and its script, which draws foreign texts as text and never as HTML.

Rows of a run's story come as HTML from `view.report`, escaped there; the page's policy runs nothing but this script.
"""

from __future__ import annotations

from typing import Final

from backplane.view.report_files import CSS as REPORT_CSS

CSS: Final = (
    REPORT_CSS
    + """
nav { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; border-bottom: 1px solid var(--line);
  padding-bottom: .4rem; }
nav b { font-size: 1.1rem; } a { color: var(--accent); }
form { display: flex; gap: .5rem; flex-wrap: wrap; margin: .8rem 0; align-items: end; }
label { display: flex; flex-direction: column; gap: .15rem; color: var(--dim); font-size: 13px; }
input, select, textarea { font: inherit; color: var(--ink); background: var(--box); border: 1px solid var(--line);
  border-radius: 6px; padding: .35rem .5rem; }
textarea { width: min(44rem, 90vw); } label.line { flex-direction: row; align-items: center; }
button { border: 1px solid var(--line); border-radius: 6px; background: var(--box); color: var(--ink);
  cursor: pointer; }
.ask { border: 2px solid var(--warn); border-radius: 8px; padding: .6rem .8rem; margin: .8rem 0; }
.said { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
#note { margin: .5rem 0; color: var(--bad); } main > .wide th, main > .wide td { white-space: nowrap; }
main > .wide td.cut { max-width: 32rem; white-space: normal; }
@media (max-width: 40rem) { main > .wide :is(th, td):is(:nth-child(1), :nth-child(3), :nth-child(5), :nth-child(6))
  { display: none; } .picks { display: none; } main > .wide :is(th, td) { padding: .2rem .3rem; } }
ul.plan { list-style: none; padding-left: .2rem; }
section.ask h2 { margin-top: .2rem; } p > button { margin-right: .5rem; }
"""
)

BODY: Final = """
<nav aria-label="places"><b>backplane</b> <a href="#/">runs</a> <a href="#/new" id="to-new">new</a></nav>
<p id="note" role="alert"></p><main id="main"></main><div id="said" class="said" aria-live="polite"></div>
"""

JS: Final = r"""
'use strict';
(function () {
  var main = document.getElementById('main'), note = document.getElementById('note');
  var said = document.getElementById('said');
  var given = /^#(token|code)=([\w-]+)$/.exec(location.hash), token = sessionStorage.getItem('token') || '';
  if (given) history.replaceState(null, '', '#/');
  function keep(words) { token = words; sessionStorage.setItem('token', words); }
  if (given && given[1] === 'token') keep(given[2]);
  var open = null, timer = 0, picked = [];
  // A tab opened by Ctrl-click has no storage of ours; the tabs of this origin pass it the token.
  var tabs = new BroadcastChannel('token');
  tabs.onmessage = function (event) {
    if (event.data === 'wanted') { if (token) tabs.postMessage({ token: token }); }
    else if (!token) { keep(event.data.token); go(); }
  };

  function el(name, words, kind) {
    var made = document.createElement(name);
    if (words !== undefined && words !== null) made.textContent = String(words);
    if (kind) made.className = kind;
    return made;
  }
  function add(parent) {
    for (var i = 1; i < arguments.length; i++) if (arguments[i]) parent.appendChild(arguments[i]);
    return parent;
  }
  function button(words, act) { var made = el('button', words); made.type = 'button'; made.onclick = act; return made; }
  function ask(path, body, signal) {
    var key = body && body.code ? 'Code ' + body.code : 'Bearer ' + token;
    var how = { headers: { Authorization: key }, signal: signal, cache: 'no-store' };
    if (body !== undefined) {
      how.method = 'POST'; how.body = JSON.stringify(body); how.headers['Content-Type'] = 'application/json';
    }
    return fetch(path, how).then(function (answer) {
      if (answer.ok) { note.textContent = ''; return answer; }
      return answer.json().catch(function () { return {}; }).then(function (told) {
        throw new Error((told.code || answer.status) + ': ' + (told.message || answer.statusText) +
          (told.hint ? ' \u2014 ' + told.hint : ''));
      });
    });
  }
  function fail(error) { if (error.name !== 'AbortError') note.textContent = error.message; }
  function leave() {
    if (open) open.abort();
    open = null; clearTimeout(timer); main.replaceChildren();
  }

  // The list
  var filters = { text: '', failed: false, live: false };
  var turn = 0;  // An answer to an earlier look draws nothing and begins no further one.
  function list() {
    var form = el('form'), search = el('input'), table = el('div', null, 'wide');
    search.type = 'search'; search.id = 'words'; search.value = filters.text;
    form.onsubmit = function (event) { event.preventDefault(); };
    search.oninput = function () { filters.text = search.value; again(); };
    add(form, add(el('label', 'words in task or events'), search));
    ['failed', 'live'].forEach(function (name) {
      var box = el('input'); box.type = 'checkbox'; box.checked = filters[name]; box.id = 'only-' + name;
      box.onchange = function () { filters[name] = box.checked; again(); };
      add(form, add(el('label', ' only ' + name, 'line'), box));
    });
    var compare = button('compare two', function () {
      if (picked.length === 2) report(picked, 'compare.html'); else note.textContent = 'pick two runs first';
    });
    compare.className = 'picks'; add(form, compare);
    add(main, el('h1', 'Runs'), form, table);
    function again() { turn += 1; clearTimeout(timer); timer = setTimeout(look, 150); }
    function look() {
      var mine = turn += 1;
      var query = '?text=' + encodeURIComponent(filters.text) + '&failed=' + +filters.failed + '&live=' + +filters.live;
      if (document.hidden) { timer = setTimeout(look, 1000); return; }
      ask('/api/runs' + query).then(function (answer) { return answer.json(); }).then(function (runs) {
        if (mine === turn && table.isConnected) { draw(table, runs); timer = setTimeout(look, 2000); }
      }).catch(function (error) {
        if (mine === turn && table.isConnected) { fail(error); timer = setTimeout(look, 4000); }
      });
    }
    look();
  }
  function draw(table, runs) {
    var focused = document.activeElement && document.activeElement.id;
    var made = el('table'), head = el('tr'), body = el('tbody');
    add(made, el('caption', runs.length + ' runs, live ones first'), add(el('thead'), head), body);
    ['', 'run', 'when', 'state', 'backend', 'cost', 'task'].forEach(function (name) {
      var cell = el('th', name || 'pick', name ? '' : 'dim'); cell.scope = 'col'; add(head, cell);
    });
    runs.forEach(function (run) {
      var row = el('tr'), link = el('a', run.run_id.slice(0, 8), 'mono'), box = el('input');
      link.href = '#/run/' + run.run_id; link.id = 'to-' + run.run_id;
      box.type = 'checkbox'; box.id = 'pick-' + run.run_id; box.checked = picked.indexOf(run.run_id) >= 0;
      box.setAttribute('aria-label', 'pick run ' + run.run_id.slice(0, 8));
      box.onchange = function () {
        picked = picked.filter(function (id) { return id !== run.run_id; });
        if (box.checked) picked = picked.concat([run.run_id]).slice(-2);
      };
      add(row, add(el('td'), box), add(el('td'), link), el('td', run.when),
        add(el('td'), el('span', run.standing, run.tone)), el('td', run.backend), el('td', run.cost),
        el('td', (run.task || '(its task is not known here)') + (run.cause ? ' \u2014 ' + run.cause : ''), 'cut'));
      add(body, row);
    });
    table.replaceChildren(made);
    if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
  }

  // One run
  function run(id) {
    var head = el('h1', '\u2026'), chip = el('span', '', 'chip'), facts = el('p', '', 'dim'), doing = el('ul');
    var asks = el('div'), plan = el('ul', null, 'plan'), story = el('section'), rows = [], shown = {};
    var buttons = el('p'), beyond = el('p', '', 'dim'), api = '/api/runs/' + id, spoken = null;
    add(buttons, button('report', function () { report([id], id.slice(0, 8) + '.html'); }));
    var stop = button('cancel', function () { ask(api + '/cancel', {}).catch(fail); });
    stop.id = 'cancel'; add(buttons, stop);
    add(main, add(el('p'), chip), head, facts, buttons, asks, doing, plan);
    add(main, add(story, el('h2', 'What happened')), beyond);
    function state(now) {
      head.textContent = now.task || '(its task is not known here)';
      chip.textContent = now.standing; chip.className = 'chip ' + now.tone;
      facts.textContent = now.facts; stop.hidden = now.ended;
      doing.replaceChildren(); now.doing.forEach(function (line) { add(doing, el('li', line)); });
      plan.replaceChildren(); now.plan.forEach(function (step) { add(plan, el('li', step)); });
      var open = {}; now.asks.forEach(function (one) { open[one.id] = 1; if (!shown[one.id]) question(one); });
      Object.keys(shown).forEach(function (key) { if (!open[key]) { shown[key].remove(); delete shown[key]; } });
      var words = now.asks.length ? 'asks: ' + now.asks[0].message : now.ended ? now.standing : now.message;
      if (words && words !== spoken) { spoken = words; said.textContent = words; }
      beyond.textContent = now.beyond ? now.beyond + ' more rows are in the report' : '';
      if (now.verdict && !story.verdict) { story.verdict = add(main, el('p', now.verdict, 'dim')); }
    }
    function shownBody(words) {  // A diff in its colours, as in a report.
      var made = el('pre', null, 'diff'), isDiff = /^(diff --git|--- |@@ )/m.test(words);
      if (!isDiff) { made.textContent = words; return made; }
      words.split('\n').forEach(function (line) {
        var kind = { '+': 'added', '-': 'removed', '@': 'hunk', 'd': 'file' }[line.charAt(0)] || '';
        if (/^(\+\+\+|---) /.test(line)) kind = 'meta';
        add(made, el('span', line || '\u00a0', kind));
      });
      return made;
    }
    function question(one) {
      var box = el('section', null, 'ask'), why = el('input'), always = el('input'), form = el('form');
      box.setAttribute('aria-label', 'question'); why.id = 'why-' + one.id; always.id = 'always-' + one.id;
      always.type = 'checkbox';
      function tell(decision) {
        var body = { ask: one.id, shown: one.shown, decision: decision, always: always.checked };
        if (one.kind === 'input' && decision === 'allow') body.text = why.value; else body.reason = why.value;
        ask(api + '/answer', body).catch(fail);
      }
      form.onsubmit = function (event) { event.preventDefault(); };
      add(form, add(el('label', one.kind === 'input' ? 'your answer' : 'reason'), why));
      if (one.kind !== 'input') add(form, add(el('label', ' always in this run', 'line'), always));
      add(form, button(one.kind === 'input' ? 'answer' : 'allow', function () { tell('allow'); }),
        button('deny', function () { tell('deny'); }));
      add(asks, add(box, el('h2', one.message), one.body ? shownBody(one.body) : null, form)); shown[one.id] = box;
    }
    function take(line) {
      var told = JSON.parse(line);
      if (told.fresh) { rows.forEach(function (row) { row.remove(); }); rows = []; }
      (told.rows || []).forEach(function (row) {
        var made = rows[row[0]];
        if (!made) { made = rows[row[0]] = el('div'); add(story, made); }
        made.className = 'row ' + row[1]; made.tabIndex = -1; made.innerHTML = row[2];
      });
      if (told.state) state(told.state);
    }
    function follow() {
      var controller = open = new AbortController(), over = false;
      ask(api + '/stream', undefined, controller.signal).then(function (answer) {
        var reader = answer.body.getReader(), decoder = new TextDecoder(), rest = '';
        return reader.read().then(function more(part) {
          if (part.done) return;
          var lines = (rest + decoder.decode(part.value, { stream: true })).split('\n');
          rest = lines.pop();
          lines.forEach(function (line) { take(line); over = over || line.indexOf('"over":true') === 1; });
          return reader.read().then(more);
        });
      }).catch(fail).then(function () {
        if (!over && open === controller && head.isConnected) timer = setTimeout(follow, 1000);
      });
    }
    document.onvisibilitychange = function () {  // A browser has six connections a host.
      if (!head.isConnected) return;
      if (document.hidden) { if (open) open.abort(); open = null; } else if (!open) follow();
    };
    follow();
  }
  function report(ids, name) {
    ask('/api/report?runs=' + ids.join(',')).then(function (answer) { return answer.blob(); }).then(function (blob) {
      var link = el('a'); link.href = URL.createObjectURL(blob); link.download = name; link.click();
      setTimeout(function () { URL.revokeObjectURL(link.href); }, 10000);
    }).catch(fail);
  }

  // A new order
  function order() {
    ask('/api/form').then(function (answer) { return answer.json(); }).then(function (offer) {
      var form = el('form'), task = el('textarea'), backend = el('select'), root = el('select');
      task.rows = 4; task.id = 'task'; task.required = true; backend.id = 'backend'; root.id = 'root';
      offer.backends.forEach(function (name) { add(backend, el('option', name)); });
      offer.roots.forEach(function (name) { add(root, el('option', name)); });
      var start = el('button', 'start'); start.type = 'submit'; start.id = 'start';
      form.onsubmit = function (event) {
        event.preventDefault();
        ask('/api/orders', { task: task.value, backend: backend.value, root: root.value })
          .then(function (answer) { return answer.json(); })
          .then(function (begun) { location.hash = '#/run/' + begun.run_id; }).catch(fail);
      };
      add(main, el('h1', 'New order'));
      if (!offer.roots.length) { add(main, el('p', offer.why)); return; }
      add(form, add(el('label', 'task'), task), add(el('label', 'backend'), backend));
      add(form, add(el('label', 'folder'), root), start);
      add(main, form, el('p', 'It works in a copy; what it asks is answered here or in a terminal.', 'dim'));
    }).catch(fail);
  }

  function go() {
    leave(); note.textContent = '';
    var found = /^#\/run\/([0-9a-f-]{36})$/.exec(location.hash);
    if (!token) {
      tabs.postMessage('wanted'); note.textContent = 'open the address with its token, as the terminal printed it';
      return;
    }
    if (found) run(found[1]); else if (location.hash === '#/new') order(); else list();
  }
  window.addEventListener('hashchange', go);
  if (!given || given[1] === 'token') go();
  else ask('/api/token', { code: given[2] }).then(function (answer) { return answer.json(); })
    .then(function (told) { keep(told.token); go(); }).catch(fail);
})();
"""
