// Every member of the Node client's types, as a caller would use it; compiled only, never run.
import { connect, verify, BackplaneError, type Answer, type Ask, type Client, type End, type WorkOrder } from './backplane.mjs';

const order: WorkOrder = {
  task: 'fix the failing test',
  lane: 'patch_first',
  workspace: { root: '.', mode: 'staged', exclude: ['**/*.log'] },
  policy: { require_approval_for: ['bash'] },
  requirements: { required: [{ capability: 'tool_bash', min_support: 'emulated' }] },
  config: { vendor: { abp: { backend: 'shell' } }, env: { TONE: 'calm' }, max_turns: 3 },
};

// @ts-expect-error: an order without a task is none
const hopeless: WorkOrder = { lane: 'patch_first' };

const onAsk = async (ask: Ask): Promise<Answer> =>
  ask.kind === 'tool' && ask.name === 'bash' ? { decision: 'allow', remember: 'run' } : { decision: 'deny', reason: 'no' };

export async function use(): Promise<boolean> {
  const client: Client = await connect({ command: ['backplane', 'serve'], cwd: '.', env: { PATH: '/bin' } });
  await client.ping();
  const run = await client.submit(order, { onAsk });
  for await (const { event, bytes } of run) {
    if (event.type === 'assistant_message') console.log(event.text, bytes.length);
    else await run.cancel('enough', 1000);
  }
  const end: End = await run.end();
  if (end.t === 'fatal') throw new BackplaneError(end.errorCode ?? 'internal', end.error ?? '');
  await client.close();
  return end.bytes !== undefined && verify(end.bytes, end.events) && end.receipt?.outcome === 'complete' && !hopeless;
}
