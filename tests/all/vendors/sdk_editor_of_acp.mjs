// An editor made with the public TypeScript SDK of the Agent Client Protocol; the twin of `sdk_editor_of_acp.py`.
//
// The SDK checks every message of the agent. Arguments: a folder, then the agent's command. It permits the first call,
// rejects the second and leaves the third open while it cancels, cancels a prompt, lists, resumes and loads the session,
// and prints what it saw as JSON, with every line that was sent and that came.

import { spawn } from "node:child_process";
import { Readable } from "node:stream";
import { client, methods, ndJsonStream, PROTOCOL_VERSION } from "@agentclientprotocol/sdk";

const [folder, command, ...args] = process.argv.slice(2);
const { session } = methods.agent;
const seen = { updates: [], stops: [], asked: [], sent: [], came: [] };

const program = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
const output = new WritableStream({
  write(data) {
    seen.sent.push(Buffer.from(data).toString());
    program.stdin.write(data);
  },
});
const input = Readable.toWeb(program.stdout).pipeThrough(new TransformStream({
  transform(data, out) {
    seen.came.push(Buffer.from(data).toString());
    out.enqueue(data);
  },
}));
const stream = ndJsonStream(output, input);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const code = (error) => error.code;

let wasAsked;
const asked = new Promise((done) => (wasAsked = done));
const editor = client({ name: "editor" })
  .onNotification(methods.client.session.update, ({ params }) => {
    seen.updates.push(params.update.sessionUpdate);
  })
  .onRequest(methods.client.session.requestPermission, async ({ params }) => {
    seen.asked.push(params.toolCall.title);
    if (seen.asked.length === 3) {
      wasAsked();
      await pause(1000);
      return { outcome: { outcome: "cancelled" } };
    }
    const wanted = seen.asked.length === 1 ? "allow_once" : "reject_once";
    return { outcome: { outcome: "selected", optionId: params.options.find((one) => one.kind === wanted).optionId } };
  });

await editor.connectWith(stream, async (agent) => {
  await agent.request(methods.agent.initialize, { protocolVersion: PROTOCOL_VERSION, clientCapabilities: {} });
  seen.unknown = await agent.request("nothing/here", {}).catch(code);
  const { sessionId, modes } = await agent.request(session.new, { cwd: folder, mcpServers: [] });
  seen.mode = modes.currentModeId;
  const say = (text) => agent.request(session.prompt, { sessionId, prompt: [{ type: "text", text }] });
  for (const text of ["first", "second"]) seen.stops.push((await say(text)).stopReason);
  const words = say("third");
  await pause(1500);
  await agent.notify(session.cancel, { sessionId });
  seen.stops.push((await words).stopReason);
  const call = say("fourth");
  await asked;
  await agent.notify(session.cancel, { sessionId });
  seen.stops.push((await call).stopReason);
  await agent.request(session.setMode, { sessionId, modeId: "two" });
  await agent.request(session.close, { sessionId });
  await agent.request(session.close, { sessionId }); // The SDK takes "not found" for "closed already".
  const { sessions } = await agent.request(session.list, { cwd: folder });
  seen.listed = sessions.length === 1 && sessions[0].sessionId === sessionId;
  await agent.request(session.resume, { cwd: folder, sessionId, mcpServers: [] });
  await agent.request(session.close, { sessionId });
  seen.updates.push("load");
  const loaded = await agent.request(session.load, { cwd: folder, sessionId, mcpServers: [] });
  seen.mode_after = loaded.modes.currentModeId;
});
const ended = new Promise((done) => program.once("exit", done));
program.stdin.end();
seen.code = await ended;
console.log(JSON.stringify(seen));
