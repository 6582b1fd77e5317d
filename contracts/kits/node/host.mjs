// The host's end of the line: hello, many runs at once, asks, cancel, ping, and every way to end.
// One file without dependencies, for Node 20 and later. The rules are those of ../../sidecar.md.
//
//   import { serve } from './host.mjs';
//   serve({ id: 'mine', capabilities: { streaming: 'native' } }, async (run) => {
//     await run.event('assistant_message', { text: run.order.task });
//   });
import { randomUUID } from 'node:crypto';
import { resolve } from 'node:path';

const VERSION = 'abp/v0.1';
const EXTENSIONS = ['cancel/1', 'ping/1', 'ask/1', 'many/1'];
const HEEDS = ['model', 'max_turns', 'max_budget_usd', 'context'];
const LINE_BYTES_MAX = 16 * 1024 * 1024; // S4
const DEPTH_MAX = 128; // S3
const GRACE_MS = 2000; // S51: where the canceller named none
const GRACE_MARGIN_MS = 300; // Kept back from a grace, so that the end is still in time.
const ASK_MS = 300_000;
const PEER_LOOK_MS = 1000;
const NAME_CHARS_MAX = 256; // Of a tool's name.
const PATTERN_BYTES_MAX = 1024;
const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;

export class HostError extends Error {
  /** `code` is one of ../../errors.md and goes into the run's `fatal`. */
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
const now = () => new Date().toISOString();

/**
 * Be a host on this process's stdin and stdout until the end of stdin and of the last run.
 * `host` is `{id, version?, capabilities, heeds?}`; `heeds` names the settings of an order that `work` does something
 * with (S9), and an order with another one is refused by the control plane. `work(run)` does one run and may give back
 * `{outcome?, usage?, usageRaw?, artifacts?}`; what it throws ends the run with a `fatal`.
 */
export function serve(host, work) {
  new Line(host, work).open();
}

class Line {
  constructor(host, work) {
    this.backend = { id: host.id, backend_version: host.version ?? null, adapter_version: null };
    this.capabilities = host.capabilities ?? {};
    this.heeds = host.heeds ?? HEEDS;
    this.work = work;
    this.runs = new Map();
    this.stdinOpen = true;
  }

  open() {
    for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP']) process.on(signal, () => this.endAll(`the host got ${signal}`, 0));
    process.stdout.on('error', () => this.endAll('nobody reads this host', 1)); // S37
    const parent = process.ppid;
    const look = () => process.ppid !== parent && this.endAll('the control plane is gone', 1);
    setInterval(look, PEER_LOOK_MS).unref();
    for (const name of ['log', 'info', 'debug']) console[name] = console.error; // S2: stdout carries messages alone.
    const { backend, capabilities, heeds } = this;
    this.send({ t: 'hello', contract_version: VERSION, backend, capabilities, mode: 'mapped', extensions: EXTENSIONS, heeds });
    this.readLines();
  }

  /** Write one message whole; resolves when the pipe takes more (S25). */
  async send(message) {
    const line = typeof message === 'string' ? message : JSON.stringify(message, (_, v) => (typeof v === 'string' ? v.toWellFormed() : v));
    if (process.stdout.write(line + '\n') || process.stdout.destroyed) return;
    // One wait for all who write: each with listeners of its own would be taken for a leak.
    this.drained ??= new Promise((resolve) => process.stdout.once('drain', resolve).once('close', resolve)).then(() => (this.drained = undefined));
    await this.drained;
  }

  readLines() {
    let pieces = [];
    let held = 0;
    const hold = (piece) => {
      held += piece.length;
      if (held > LINE_BYTES_MAX) pieces = [];
      else pieces.push(piece);
    };
    const flush = () => {
      const [line, size] = [Buffer.concat(pieces), held];
      [pieces, held] = [[], 0];
      if (size > LINE_BYTES_MAX) this.complain(null, 'protocol_invalid_envelope', `a line is over ${LINE_BYTES_MAX} bytes`);
      else this.take(line);
    };
    process.stdin.on('data', (data) => {
      let start = 0;
      for (let end; (end = data.indexOf(10, start)) >= 0; start = end + 1) {
        hold(data.subarray(start, end));
        flush();
      }
      hold(data.subarray(start));
    });
    process.stdin.on('error', () => process.stdin.destroy());
    process.stdin.once('close', () => {
      flush(); // S35: a last line without its newline counts.
      this.stdinOpen = false;
      for (const run of this.runs.values()) run._stdinEnded();
      this.exitWhenDone();
    });
  }

  complain(refId, code, error) {
    this.send({ t: 'fatal', ref_id: refId, error, error_code: code });
  }

  take(bytes) {
    let line, message;
    try {
      line = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
      if (line.trim() === '') return; // S7
      message = strict(line);
    } catch (error) {
      this.complain(null, 'protocol_invalid_envelope', `unreadable line: ${error.message}`);
      return;
    }
    const handlers = { run: this.begin, cancel: this.cancel, answer: this.answer, ping: this.ping };
    if (isObject(message) && Object.hasOwn(handlers, message.t)) handlers[message.t].call(this, message, line);
  }

  begin(message) {
    const { id, work_order: order, extensions } = message;
    const named = typeof id === 'string' ? id : null;
    if (this.runs.has(named)) {
      this.complain(null, 'protocol_unexpected_message', 'a run of this id is open already');
    } else if (named === null || !isObject(order) || typeof order.task !== 'string' || !UUID.test(order.id) || typeof order.workspace?.root !== 'string') {
      this.complain(named, 'contract_schema_violation', 'a run needs an id and an order with id, task and workspace.root');
    } else {
      order.workspace.root = resolve(order.workspace.root); // S20: against the folder that we were started in
      let run;
      try {
        run = new Run(this, id, order, Array.isArray(extensions) ? extensions : []);
      } catch (error) {
        return this.complain(id, 'policy_invalid', String(error.message));
      }
      this.runs.set(id, run);
      if (!this.stdinOpen) run._stdinEnded();
      run._do();
    }
  }

  cancel({ ref_id: refId, reason, grace_ms: graceMs }) {
    this.runs.get(refId)?._cancel(reason ?? 'cancelled by the control plane', Number.isInteger(graceMs) ? graceMs : GRACE_MS);
  }

  answer(message) {
    this.runs.get(message.ref_id)?._answered(message);
  }

  // S53: the number may be larger than a double holds exactly, so its digits are copied, not read.
  ping(_, line) {
    const digits = /"seq"\s*:\s*([0-9]{1,20})\s*[,}]/.exec(line);
    if (digits) this.send(`{"t":"pong","seq":${digits[1]}}`);
  }

  /** Cancel what runs, and end within the grace whatever the host's own code does (S36, S37). */
  endAll(reason, code) {
    if (this.ending) return;
    this.ending = true;
    process.exitCode = code;
    process.stdin.destroy();
    setTimeout(() => process.exit(1), GRACE_MS - GRACE_MARGIN_MS).unref();
    for (const run of this.runs.values()) run._cancel(reason, GRACE_MS - GRACE_MARGIN_MS);
    this.stdinOpen = false;
    this.exitWhenDone();
  }

  exitWhenDone() {
    if (this.stdinOpen || this.runs.size) return;
    const exit = () => process.exit(process.exitCode ?? 0);
    if (process.stdout.writableLength && !process.stdout.destroyed) process.stdout.end(exit);
    else exit();
  }
}

/** One run: the order, the ways to say what happens, and `signal`, an AbortSignal for when it is cancelled. */
class Run {
  constructor(line, id, order, extensions) {
    this.id = id;
    this.order = order;
    this.extensions = extensions;
    this.graceMs = GRACE_MS; // For the host's own clean-up once `signal` is aborted.
    const { allowed_tools: allowed = [], disallowed_tools: denied = [], require_approval_for: open = [] } = order.policy ?? {};
    this._rules = { allowed: allowed.length ? globs(allowed) : undefined, denied: globs(denied), open: globs(open) };
    this._line = line;
    this._abort = new AbortController();
    this.signal = this._abort.signal;
    this._asks = new Map();
    this._asked = 0;
    this._said = 0;
    this._startedAt = now();
    this._startedMs = performance.now();
  }

  /** Send one event, for example `event('tool_call', {tool_name, input})`; wait for it where many follow. */
  async event(type, members) {
    if (this._over) return;
    this._said += 1;
    await this._line.send({ t: 'event', ref_id: this.id, event: { ts: now(), type, ...members } });
  }

  /**
   * Ask before a tool runs. Resolves to `{decision, input?, reason?}`; a denial is a tool result, not an end.
   * With `modify`, `input` is what to use instead.
   */
  async may(name, input, more = {}) {
    const names = namesOf(name);
    const { allowed, denied, open } = this._rules;
    const forbidden = !name || name.length > NAME_CHARS_MAX || denied(...names) || (allowed && !allowed(...names));
    const unasked = { decision: forbidden || open(...names) ? 'deny' : 'allow' };
    // What is forbidden is asked all the same: only so the receipt knows that it did not run.
    const answer = this._canAsk() ? await this.ask({ kind: 'tool', name, input, default: 'deny', ...more }) : unasked;
    // Whoever begins to listen to `signal` only now would not hear it any more.
    if (this.signal.aborted) return { decision: 'deny', reason: this._cancelled };
    if (forbidden) return { decision: 'deny', reason: `the policy denies ${name}` };
    // S56: what was to be changed never runs as it was.
    const given = answer.input ?? undefined;
    if (answer.decision === 'modify' && typeof given !== 'object') return { decision: 'deny', reason: 'the answer is modify and gives no input' };
    if (answer.decision === 'allow' && given !== undefined) return { decision: 'deny', reason: 'the answer is allow and gives another input' };
    return answer;
  }

  /** Put any ask of S55; resolves to the answer's members. Where nobody can answer, the default decides. */
  ask(members) {
    const byDefault = (reason) => ({ decision: members.default ?? 'deny', reason });
    if (!this._canAsk()) return Promise.resolve(byDefault('nobody can be asked'));
    const id = `ask-${(this._asked += 1)}`;
    return new Promise((resolve) => {
      const late = setTimeout(() => settle(byDefault('nobody answered in time')), ASK_MS);
      const settle = (answer) => {
        clearTimeout(late);
        this._asks.delete(id);
        resolve(answer ?? byDefault('nobody is there to answer'));
      };
      this._asks.set(id, settle);
      this._line.send({ t: 'ask', ref_id: this.id, id, deadline_ms: ASK_MS, ...members });
    });
  }

  _canAsk() {
    return this._line.stdinOpen && this.extensions.includes('ask/1') && !this.signal.aborted;
  }

  _answered({ id, decision, input, text, reason }) {
    if (['allow', 'deny', 'modify'].includes(decision)) this._asks.get(id)?.({ decision, input, text, reason });
  }

  _stdinEnded() {
    if (this.extensions.includes('cancel/1')) this._cancel('the control plane is gone', GRACE_MS); // S34
    this._settleAll();
  }

  _settleAll() {
    for (const settle of [...this._asks.values()]) settle();
  }

  _cancel(reason, graceMs) {
    if (this.signal.aborted) return; // S52
    this.graceMs = Math.max(graceMs - GRACE_MARGIN_MS, 0);
    this._cancelled = reason;
    this._abort.abort(new HostError('stream_closed', reason));
    this._settleAll();
  }

  async _do() {
    const late = new Promise((_, reject) => {
      this.signal.addEventListener('abort', () => setTimeout(() => reject(new HostError('backend_timeout', 'it did not end in the grace')), this.graceMs), { once: true });
    });
    let ending;
    try {
      await this.event('run_started', { message: `${this._line.backend.id} starts` });
      const done = (await Promise.race([this._line.work(this), late])) ?? {};
      if (!this._cancelled) await this.event('run_completed', { message: `${this._line.backend.id} ends: ${done.outcome ?? 'complete'}` });
      ending = this._final(done);
    } catch (error) {
      const stopped = this._cancelled && error.code !== 'backend_timeout';
      const code = /^[a-z]+(_[a-z]+)+$/.test(error?.code) ? error.code : 'internal';
      ending = stopped ? this._final({}) : { t: 'fatal', ref_id: this.id, error: String(error?.message ?? error), error_code: code };
    }
    this._over = true;
    this._line.runs.delete(this.id);
    await this._line.send(ending);
    this._line.exitWhenDone();
  }

  _final({ outcome, usage = {}, usageRaw = {}, artifacts = [] }) {
    const ended = this._cancelled && outcome !== 'complete' ? (this._said > 1 ? 'partial' : 'failed') : (outcome ?? 'complete');
    const meta = {
      run_id: UUID.test(this.id) ? this.id : randomUUID(),
      work_order_id: this.order.id,
      contract_version: VERSION,
      started_at: this._startedAt,
      finished_at: now() < this._startedAt ? this._startedAt : now(),
      duration_ms: Math.round(performance.now() - this._startedMs),
    };
    const { backend, capabilities } = this._line;
    const raw = this._cancelled ? { ...usageRaw, cancelled: this._cancelled } : usageRaw;
    // S32, S33: the control plane has seen the trace and seals the receipt.
    const seen = { trace: [], artifacts, verification: { harness_ok: true }, receipt_sha256: null };
    return { t: 'final', ref_id: this.id, receipt: { meta, backend, capabilities, mode: 'mapped', usage_raw: raw, usage, ...seen, outcome: ended } };
  }
}

/** Read strict JSON (S3). */
function strict(line) {
  let depth = 0;
  for (const [token] of line.matchAll(/"(?:[^"\\]|\\.)*"|[[\]{}]/gs)) {
    if ('[{'.includes(token)) depth += 1;
    else if (']}'.includes(token)) depth -= 1;
    if (depth > DEPTH_MAX) throw new Error(`more than ${DEPTH_MAX} levels deep`);
  }
  return JSON.parse(line, (_, value) => {
    if (typeof value === 'string' && !value.isWellFormed()) throw new Error('half a character');
    if (typeof value === 'number' && !Number.isFinite(value)) throw new Error('a number beyond a double');
    return value;
  });
}

/** Both spellings of a tool, as ../../policy-rules.md has them. */
const SPELLINGS = {
  Read: 'read_file', Write: 'write_file', Edit: 'edit_file', MultiEdit: 'multi_edit', LS: 'list_files', Glob: 'glob', Grep: 'grep',
  Bash: 'bash', WebFetch: 'web_fetch', WebSearch: 'web_search',
};

/** Names by which agents call a tool that runs a command line; each is bash, too. */
const SHELLS = new Set(['Shell', 'shell', 'local_shell', 'run_shell_command', 'run_command', 'run_terminal_cmd', 'run_in_terminal',
  'execute_command', 'exec_command', 'Terminal', 'terminal']);

/** Every name a tool goes by: its own, the neutral one, and the neutral one's second spelling. */
function namesOf(name) {
  const neutral = Object.hasOwn(SPELLINGS, name) ? SPELLINGS[name] : SHELLS.has(name) ? 'bash' : name;
  const second = Object.keys(SPELLINGS).find((spelling) => SPELLINGS[spelling] === neutral);
  return [...new Set([name, neutral, second ?? neutral])];
}

/** A test of names by a list of globs (../../policy-rules.md). Throws `policy_invalid` where one is none. */
export function globs(patterns) {
  const read = patterns.map(piecesOf);
  const matches = (pieces, bytes) => follow(pieces, bytes, new Set([0])).has(bytes.length);
  return (...names) => names.map((name) => Buffer.from(name)).some((bytes) => read.some((pieces) => matches(pieces, bytes)));
}

// A piece of a pattern takes the places in a text where it may start, and gives those where it may end: no place is tried twice.
const follow = (pieces, bytes, starts) => pieces.reduce((places, piece) => piece(bytes, places), starts);
const one = (fits) => (bytes, starts) => new Set([...starts].filter((at) => at < bytes.length && fits(bytes[at])).map((at) => at + 1));
const any = (choices) => (bytes, starts) => new Set(choices.flatMap((pieces) => [...follow(pieces, bytes, starts)]));
const from = (starts, bytes, ends) => {
  const found = new Set(starts);
  for (let at = Math.min(...starts); at < bytes.length; at += 1) if (ends(bytes[at])) found.add(at + 1);
  return found;
};
const star = (bytes, starts) => from(starts, bytes, () => true);
const folders = (bytes, starts) => from(starts, bytes, (byte) => byte === 47);
const literal = (letter) => [...Buffer.from(letter)].map((wanted) => one((byte) => byte === wanted));

function piecesOf(pattern) {
  const wrong = (fact) => new HostError('policy_invalid', `glob ${JSON.stringify(pattern.slice(0, 80))} ${fact}`);
  if (Buffer.byteLength(pattern) > PATTERN_BYTES_MAX) throw wrong(`is longer than ${PATTERN_BYTES_MAX} bytes`);
  const letters = [...pattern];
  const open = [{ choices: [], pieces: [] }]; // The pattern, and in it each brace that is open.
  for (let at = 0; at < letters.length; at += 1) {
    const letter = letters[at];
    const { choices, pieces } = open.at(-1);
    if (letter === '*' && letters[at + 1] === '*') {
      const starts = pieces.length === 0;
      const whole = letters[at + 2] === '/' && (starts || letters[at - 1] === '/');
      const all = !whole || (starts && at + 3 === letters.length && open.length === 1);
      pieces.push(all ? star : folders);
      at += whole ? 2 : 1;
    } else if (letter === '*') {
      pieces.push(star);
    } else if (letter === '?') {
      pieces.push(one(() => true));
    } else if (letter === '[') {
      const begin = at + 1 + (['!', '^'].includes(letters[at + 1]) ? 1 : 0);
      const end = letters.indexOf(']', begin + 1); // A `]` right at the start is a member.
      if (end < 0) throw wrong("has a '[' that is not closed");
      const listed = bytesOf(letters.slice(begin, end), wrong);
      const wanted = begin === at + 1;
      pieces.push(one((byte) => listed.has(byte) === wanted));
      at = end;
    } else if (letter === '{') {
      open.push({ choices: [], pieces: [] });
    } else if (letter === '}' || (letter === ',' && open.length > 1)) {
      if (open.length === 1) throw wrong("has a '}' that was not opened");
      choices.push(pieces);
      open.at(-1).pieces = [];
      if (letter === '}') {
        open.pop();
        const real = choices.filter((choice) => choice.length); // An empty choice beside others is none.
        if (real.length) open.at(-1).pieces.push(any(real));
      }
    } else {
      if (letter === '\\' && (at += 1) === letters.length) throw wrong('ends in a backslash');
      pieces.push(...literal(letters[at]));
    }
  }
  if (open.length > 1) throw wrong("has a '{' that is not closed");
  return open[0].pieces;
}

/** The bytes that a class lists; of a range between longer letters, those between the last byte of one and the first of the other. */
function bytesOf(members, wrong) {
  const listed = new Set();
  for (let at = 0; at < members.length; at += 1) {
    const low = members[at];
    const isRange = members[at + 1] === '-' && at + 2 < members.length;
    if (isRange) at += 2;
    const high = members[at];
    if (high.codePointAt(0) < low.codePointAt(0)) throw wrong(`has the empty range '${low}-${high}'`);
    const [first, last] = [Buffer.from(low), Buffer.from(high)];
    for (const byte of [...first, ...last]) listed.add(byte);
    if (isRange) for (let byte = first.at(-1); byte < last[0]; byte += 1) listed.add(byte);
  }
  return listed;
}
