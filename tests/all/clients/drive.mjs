// Plays the cases of a file through the Node client and says in one line of JSON how each went.
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const [library, file] = process.argv.slice(2);
const { connect, verify } = await import(pathToFileURL(library));
const { command, cases } = JSON.parse(readFileSync(file, 'utf8'));
const say = (record) => process.stdout.write(JSON.stringify(record) + '\n');

function oneDigitChanged(bytes) {
  const changed = Buffer.from(bytes);
  const at = changed.indexOf('"duration_ms":') + '"duration_ms":'.length;
  changed[at] = 49 + ((changed[at] - 48) % 9);
  return changed;
}

async function play(client, { cell, order, answer, when, change }) {
  const asks = [];
  const onAsk = answer && ((ask) => (asks.push(ask.name ?? ask.question), answer));
  const run = await client.submit(order, { onAsk });
  const types = [];
  const text = createHash('sha256');
  let textBytes = 0;
  let toolErrors = 0;
  for await (const { event } of run) {
    if (event.type !== 'warning') types.push(event.type);
    if (event.is_error) toolErrors += 1;
    if (event.type !== 'assistant_message') continue;
    text.update(event.text);
    textBytes += Buffer.byteLength(event.text);
    if (when === 'cancel') await run.cancel('the user changed his mind');
    if (when === 'kill the server') process.kill(client.pid, 'SIGKILL');
    if (when === 'wait') say({ cell, ready: true });
  }
  const end = await run.end();
  return {
    cell,
    types,
    text_bytes: textBytes,
    text_sha256: text.digest('hex'),
    tool_errors: toolErrors,
    asks,
    end: end.t,
    code: end.errorCode ?? null,
    outcome: end.receipt?.outcome ?? null,
    reason: end.receipt?.usage_raw.backplane.end.reason ?? null,
    as_streamed: end.events !== undefined,
    verified: end.verified,
    changed_verifies: change ? verify(oneDigitChanged(end.bytes), end.events) : null,
  };
}

async function playMany(client, { cell, order, times }) {
  const ended = await Promise.all(
    Array.from({ length: times }, async (_, number) => {
      const run = await client.submit({ ...order, task: `${order.task} ${number}` });
      let text = '';
      for await (const { event } of run) if (event.type === 'assistant_message') text += event.text;
      const end = await run.end();
      return { final: end.t === 'final', verified: end.verified, own: text === `${order.task} ${number}` };
    }),
  );
  const count = (name) => ended.filter((one) => one[name]).length;
  return { cell, runs: ended.length, finals: count('final'), verified: count('verified'), own: count('own') };
}

const client = await connect({ command });
await client.ping();
for (const one of cases) say(await (one.times ? playMany : play)(client, one));
await client.close();
