// Drives `backplane serve`: orders in, events, asks and one sealed receipt a run out, many runs at once.
// One file without dependencies, for Node 20 and later. The protocol is in ../sidecar.md; its rules are named S1….
import { spawn } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';

const LINE_BYTES_MAX = 16 * 1024 * 1024; // S4
const EVENTS_WAITING_MAX = 1024; // A run that nobody reads holds up the pipe from here on, so memory stays bounded.
const STDERR_CHARS_MAX = 8192;
const HELLO_MS_MAX = 10_000;
const CLOSE_MS_MAX = 5_000; // A server whose input has ended cancels its runs within this time.
const EXTENSIONS = ['cancel/1', 'ping/1', 'many/1', 'stage/1'];

export class BackplaneError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** Start a server and wait for its hello. */
export async function connect({ command = ['backplane', 'serve'], cwd, env } = {}) {
  const client = new Client(command, { cwd, env });
  const late = setTimeout(() => client._lose('protocol_handshake_failed', 'no hello came in time'), HELLO_MS_MAX);
  try {
    await client._greeted;
  } catch (error) {
    await client.close();
    throw error;
  } finally {
    clearTimeout(late);
  }
  return client;
}

class Client {
  constructor([program, ...words], { cwd, env }) {
    this.hello = undefined;
    this.problems = []; // Errors that name no run.
    this._runs = new Map();
    this._pings = new Map();
    this._stderr = '';
    this._greeted = new Promise((resolve, reject) => (this._greet = { resolve, reject }));
    this._greeted.catch(() => {}); // Whoever waits for it is told; nobody need be.
    this._child = spawn(program, words, { cwd, env, stdio: ['pipe', 'pipe', 'pipe'] });
    this._closed = new Promise((resolve) => this._child.once('close', resolve));
    this._child.once('error', (error) => this._lose('sidecar_spawn_failed', error.message));
    this._child.once('close', (code, signal) => {
      const how = signal ? `signal ${signal}` : `exit code ${code}`;
      this._lose('backend_crashed', `the server ended with ${how}; ${this._stderr.trim() || 'it said nothing'}`);
    });
    this._child.stdin.on('error', () => {}); // A server that is gone is told by its exit.
    this._child.stderr.setEncoding('utf8').on('data', (text) => {
      this._stderr = (this._stderr + text).slice(-STDERR_CHARS_MAX);
    });
    this._readLines();
  }

  get pid() {
    return this._child.pid;
  }

  /** Send an order; with `onAsk` the caller answers what the policy leaves open. */
  async submit(order, { onAsk } = {}) {
    if (this._lost) throw this._lost;
    const run = new Run(this, randomUUID(), onAsk);
    this._runs.set(run.id, run);
    const extensions = onAsk ? [...EXTENSIONS, 'ask/1'] : EXTENSIONS;
    await this._send({ t: 'run', id: run.id, work_order: order, extensions });
    return run;
  }

  /** Resolve when the server answers. */
  ping() {
    const seq = (this._seq = (this._seq ?? 0) + 1);
    return new Promise((resolve, reject) => {
      this._pings.set(seq, { resolve, reject });
      this._send({ t: 'ping', seq });
    });
  }

  /** Let go of the server: runs that are open are cancelled by it, and it has ended when this resolves. */
  async close() {
    this._child.stdin.end();
    this._child.stdout.resume();
    const stop = setTimeout(() => this._child.kill('SIGKILL'), CLOSE_MS_MAX);
    if (this._child.pid !== undefined) await this._closed;
    clearTimeout(stop);
  }

  async _send(message) {
    if (this._lost || !this._child.stdin.writable) return;
    if (this._child.stdin.write(JSON.stringify(message) + '\n')) return;
    // One wait for all who write, and a server that is gone never drains.
    const drained = () => new Promise((resolve) => this._child.stdin.once('drain', resolve));
    this._drained ??= Promise.race([drained(), this._closed]).then(() => (this._drained = undefined));
    await this._drained;
  }

  _readLines() {
    let pieces = [];
    let held = 0;
    this._child.stdout.on('data', (data) => {
      let start = 0;
      for (let end; (end = data.indexOf(10, start)) >= 0; start = end + 1) {
        pieces.push(data.subarray(start, end));
        const line = Buffer.concat(pieces);
        [pieces, held] = [[], 0];
        this._take(line);
      }
      pieces.push(data.subarray(start));
      held += data.length - start;
      if (held > LINE_BYTES_MAX) {
        this._lose('protocol_invalid_envelope', `a line is over ${LINE_BYTES_MAX} bytes`);
        this._child.kill();
      }
      this._heedReaders();
    });
    // A last line without its newline counts, where it is whole.
    this._child.stdout.on('end', () => held > 0 && this._take(Buffer.concat(pieces)));
  }

  _heedReaders() {
    const full = [...this._runs.values()].some((run) => run._waiting.length >= EVENTS_WAITING_MAX);
    if (full) this._child.stdout.pause();
    else this._child.stdout.resume();
  }

  _take(line) {
    let message;
    try {
      message = JSON.parse(line.toString('utf8'));
    } catch {
      return; // S2: noise
    }
    const run = this._runs.get(message?.ref_id);
    if (message?.t === 'hello') {
      this.hello = message;
      this._greet.resolve();
    } else if (message?.t === 'pong') {
      this._pings.get(message.seq)?.resolve();
      this._pings.delete(message.seq);
    } else if (message?.t === 'event' && run) run._hand({ event: message.event, bytes: lastMember(line, 'event') });
    else if (message?.t === 'ask' && run) run._ask(message);
    else if ((message?.t === 'final' || message?.t === 'fatal') && run) run._finish(message, line);
    else if (message?.t === 'fatal') this.problems.push(message);
  }

  _lose(code, text) {
    if (this._lost) return;
    this._lost = new BackplaneError(code, text);
    this._greet.reject(this._lost);
    for (const { reject } of this._pings.values()) reject(this._lost);
    for (const run of this._runs.values()) run._finish({ t: 'fatal', error: text, error_code: code });
  }
}

/** One order under way: iterate over it for `{event, bytes}`, then await `end()`. */
class Run {
  constructor(client, id, onAsk) {
    this.id = id;
    this._client = client;
    this._onAsk = onAsk;
    this._waiting = [];
    this._kept = []; // The events' own bytes: a receipt too long for a line is verified with them.
    this._unread = true;
    this._ended = new Promise((resolve) => (this._resolve = resolve));
  }

  async *[Symbol.asyncIterator]() {
    this._unread = false;
    try {
      for (;;) {
        while (this._waiting.length) {
          yield this._waiting.shift();
          if (this._waiting.length === EVENTS_WAITING_MAX - 1) this._client._heedReaders();
        }
        if (this._over) return;
        await new Promise((resolve) => (this._wake = resolve));
      }
    } finally {
      this._discard();
    }
  }

  /** Ask the server to end the run within the grace; go on reading for its last events and its end. */
  async cancel(reason = null, graceMs = 2000) {
    await this._client._send({ t: 'cancel', ref_id: this.id, reason, grace_ms: graceMs });
  }

  /** How the run ended. Events that nobody iterates over are let go. */
  end() {
    if (this._unread) this._discard();
    return this._ended;
  }

  _discard() {
    this._discarding = true;
    this._waiting.length = 0;
    this._client._heedReaders();
  }

  _hand(item) {
    this._kept.push(item.bytes);
    if (!this._discarding) this._waiting.push(item);
    this._wake?.();
  }

  async _ask(ask) {
    let answer;
    try {
      answer = await this._onAsk(ask);
    } catch (error) {
      answer = { decision: 'deny', reason: String(error) }; // A fault in the caller's code lets no tool through.
    }
    await this._client._send({ t: 'answer', ref_id: this.id, id: ask.id, ...answer });
  }

  _finish(message, line) {
    this._client._runs.delete(this.id);
    const bytes = message.receipt && lastMember(line, 'receipt');
    const events = message.trace === 'as_streamed' ? this._kept : undefined;
    this._over = true;
    this._resolve({
      t: message.t,
      error: message.error,
      errorCode: message.error_code,
      receipt: message.receipt,
      bytes,
      events,
      verified: bytes !== undefined && verify(bytes, events),
    });
    this._wake?.();
  }
}

// Quotes inside a string are escaped, so the first `,"name":` is the member itself; it is the last one.
function lastMember(line, name) {
  const mark = `,"${name}":`;
  return line.subarray(line.indexOf(mark) + mark.length, line.lastIndexOf('}'));
}

/**
 * Whether a receipt's canonical bytes have the hash they name.
 * `events` are the bytes of the streamed events, for a receipt whose end said `"trace":"as_streamed"`.
 */
export function verify(bytes, events) {
  const mark = '"receipt_sha256":';
  const from = bytes.indexOf(mark) + mark.length;
  const named = /^"([0-9a-f]{64})"/.exec(bytes.toString('latin1', from, from + 66));
  if (from < mark.length || !named) return false;
  const hash = createHash('sha256').update(bytes.subarray(0, from)).update('null');
  const rest = bytes.subarray(from + named[0].length);
  const trace = events ? rest.indexOf('"trace":[]') : -1;
  if (events && trace < 0) return false;
  if (!events) hash.update(rest);
  else {
    const open = trace + '"trace":['.length;
    hash.update(rest.subarray(0, open));
    events.forEach((event, index) => (index ? hash.update(',') : hash).update(event));
    hash.update(rest.subarray(open));
  }
  return hash.digest('hex') === named[1];
}
