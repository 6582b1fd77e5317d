// One order from Node, its questions answered here. Usage: node client.mjs CLIENT TASK FOLDER
// CLIENT is contracts/clients/backplane.mjs, which a program of yours keeps beside itself.
import { pathToFileURL } from 'node:url';

const [client, task, root] = process.argv.slice(2);
const { connect } = await import(pathToFileURL(client));
const plane = await connect();
const run = await plane.submit(
  { task, workspace: { root } },
  { onAsk: (ask) => ({ decision: 'deny', reason: `${ask.name} is for a person to decide` }) },
);
for await (const { event } of run) if (event.type === 'assistant_message') console.log(event.text);
const end = await run.end();
console.log(end.receipt?.outcome ?? end.errorCode, end.verified ? 'verified' : 'NOT VERIFIED');
await plane.close();
