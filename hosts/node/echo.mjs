// A whole host without a library: says the task back and seals nothing.
// Written from contracts/sidecar.md alone; the numbers in the comments are its rules.
import { randomUUID } from 'node:crypto';

const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;
const backend = { id: 'echo:node', backend_version: process.version, adapter_version: '1' };
const capabilities = { streaming: 'native' };

const send = (message) => process.stdout.write(JSON.stringify(message) + '\n');
const now = () => new Date().toISOString();
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);

// S37: nobody listens any more.
process.stdout.on('error', () => process.exit(1));
for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP']) process.on(signal, () => process.exit(0));

function receipt(runId, orderId, startedAt, startedMs) {
  const meta = {
    run_id: UUID.test(runId) ? runId : randomUUID(),
    work_order_id: orderId,
    contract_version: 'abp/v0.1',
    started_at: startedAt,
    finished_at: now(),
    duration_ms: Math.round(performance.now() - startedMs),
  };
  // S32: the control plane has seen the trace and seals the receipt.
  const seen = { trace: [], artifacts: [], verification: { harness_ok: true }, receipt_sha256: null };
  return { meta, backend, capabilities, mode: 'mapped', usage_raw: {}, usage: { request_units: 1 }, ...seen, outcome: 'complete' };
}

function run({ id, work_order: order }) {
  const refId = typeof id === 'string' ? id : null;
  if (refId === null || !isObject(order) || typeof order.task !== 'string' || !UUID.test(order.id)) {
    send({ t: 'fatal', ref_id: refId, error: 'a run needs an id and an order with an id and a task', error_code: 'contract_schema_violation' });
    return;
  }
  const startedAt = now();
  const startedMs = performance.now();
  const event = (body) => send({ t: 'event', ref_id: refId, event: { ts: now(), ...body } });
  event({ type: 'run_started', message: 'echo' });
  event({ type: 'assistant_message', text: order.task });
  event({ type: 'run_completed', message: 'done' });
  send({ t: 'final', ref_id: refId, receipt: receipt(refId, order.id, startedAt, startedMs) });
}

// S53: the number may be larger than a double holds exactly, so its digits are copied, not read.
function ping(_, line) {
  const digits = /"seq"\s*:\s*([0-9]{1,20})\s*[,}]/.exec(line);
  if (digits) process.stdout.write(`{"t":"pong","seq":${digits[1]}}\n`);
}

// A run ends before the next line is read, so a cancel always comes too late and is ignored (S52).
const answers = { run, ping };

function take(bytes) {
  let line, message;
  try {
    line = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
    if (line.trim() === '') return; // S7
    message = JSON.parse(line, (_, value) => {
      if (typeof value === 'string' && !value.isWellFormed()) throw new Error('half a character');
      return value;
    });
  } catch (error) {
    send({ t: 'fatal', ref_id: null, error: `unreadable line: ${error.message}`.toWellFormed(), error_code: 'protocol_invalid_envelope' });
    return;
  }
  if (isObject(message) && Object.hasOwn(answers, message.t)) answers[message.t](message, line);
}

send({ t: 'hello', contract_version: 'abp/v0.1', backend, capabilities, mode: 'mapped', extensions: ['cancel/1', 'ping/1'], heeds: [] });

// S1: only LF ends a line (readline would cut at U+2028 as well). S4: longer lines are skipped.
const LINE_BYTES_MAX = 16 * 1024 * 1024;
let pieces = [];
let held = 0;
const hold = (piece) => {
  held += piece.length;
  if (held > LINE_BYTES_MAX) pieces = [];
  else pieces.push(piece);
};
process.stdin.on('data', (data) => {
  let start = 0;
  for (let end; (end = data.indexOf(10, start)) >= 0; start = end + 1) {
    hold(data.subarray(start, end));
    const line = held > LINE_BYTES_MAX ? Buffer.from('{') : Buffer.concat(pieces);
    pieces = [];
    held = 0;
    take(line);
  }
  hold(data.subarray(start));
});
// S35: a last line without its newline counts; then Node ends by itself, with code 0.
process.stdin.on('end', () => take(Buffer.concat(pieces)));
