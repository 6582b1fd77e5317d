// A host in the manner of the public family's Node ones: milliseconds, extra members, alive until stdin closes.
import { createInterface } from 'node:readline';

const what = new Set(process.argv.slice(2));
const send = (message) => process.stdout.write(JSON.stringify(message) + '\n');
const now = () => new Date().toISOString();
const backend = { id: 'example_node_sidecar', backend_version: '0.1', adapter_version: '0.1', extra: 1 };
const capabilities = { streaming: 'native', tool_read: 'emulated', structured_output_json_schema: 'emulated' };
send({ t: 'hello', contract_version: 'abp/v0.1', backend, capabilities, sdk: 'x' });

createInterface({ input: process.stdin }).on('line', async (line) => {
  if (!line.trim()) return;
  const { t, id, work_order: order, seq } = JSON.parse(line);
  if (t === 'ping') send({ t: 'pong', seq });
  if (t !== 'run') return;
  const started = now();
  const trace = [];
  const event = (type, members) => {
    const value = { ts: now(), type, ...members };
    trace.push(value);
    send({ t: 'event', ref_id: id, event: value });
  };
  event('run_started', { message: 'node sidecar starting' });
  if (what.has('slow')) await new Promise((done) => setTimeout(done, 1000));
  event('assistant_message', { text: order.task });
  event('tool_call', { tool_name: 'Read', tool_use_id: 't1', parent_tool_use_id: null, input: { n: 1e21, m: 1 } });
  event('tool_result', { tool_name: 'Read', tool_use_id: 't1', output: 'x', is_error: false });
  event('command_executed', { command: 'ls' });
  event('file_changed', { path: 'a', summary: 's' });
  event('run_completed', { message: 'done' });
  const meta = { run_id: id, work_order_id: order.id, contract_version: 'abp/v0.1', started_at: started, finished_at: now(), duration_ms: 1 };
  const receipt = {
    meta, backend, capabilities, usage_raw: null, usage: { input_tokens: 1, cost_note: 'x' },
    trace: what.has('trace') ? trace : [], artifacts: [{ kind: 'log', path: 'x.log', bytes: 3 }],
    verification: { git_diff: null, git_status: null, harness_ok: true }, outcome: 'complete',
    receipt_sha256: what.has('hash') ? 'f'.repeat(64) : null,
  };
  send({ t: 'final', ref_id: id, receipt });
});
