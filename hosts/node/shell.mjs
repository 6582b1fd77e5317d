// A host with the kit: the task is a shell command, asked for before it runs, its output told as it comes.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { HostError, serve } from '../../contracts/kits/node/host.mjs';

const PREVIEW_CHARS_MAX = 2000; // 8 KiB at most, whatever the characters.
const STOP_MS = 500;

const heeds = ['max_turns', 'max_budget_usd']; // Without a model there are no turns, and nothing is spent.
serve({ id: 'shell:node', version: process.version, capabilities: { streaming: 'native', tool_bash: 'native' }, heeds }, async (run) => {
  const cwd = run.order.workspace.root;
  const call = { tool_name: 'bash', tool_use_id: 'bash-1' };
  let command = run.order.task;
  await run.event('tool_call', { ...call, input: { command } });
  let verdict = await run.may('bash', { command }, { command, cwd, tool_use_id: call.tool_use_id });
  if (verdict.decision === 'modify') {
    const changed = verdict.input.command;
    if (typeof changed === 'string') command = changed;
    else verdict = { decision: 'deny', reason: 'the changed input has no command' }; // It does not run as it was.
  }
  if (verdict.decision === 'deny') {
    await run.event('tool_result', { ...call, output: `policy_denied: ${verdict.reason}`, is_error: true });
    return { outcome: 'failed' };
  }
  const { code, preview } = await execute(run, command, cwd);
  await run.event('command_executed', { command, exit_code: code, output_preview: preview });
  await run.event('tool_result', { ...call, output: preview, is_error: code !== 0 });
  return { outcome: code === 0 ? 'complete' : 'failed', usageRaw: { exit_code: code } };
});

async function execute(run, command, cwd) {
  const env = { ...process.env, ...run.order.config?.env };
  // A group of its own, so that whatever the command starts ends with it.
  const child = spawn('/bin/sh', ['-c', `exec 2>&1\n${command}`], { cwd, env, detached: true, stdio: ['ignore', 'pipe', 'inherit'] });
  await once(child, 'spawn').catch((error) => {
    throw new HostError('execution_tool_failed', `the shell did not start: ${error.message}`);
  });
  const closed = once(child, 'close');
  const kill = (signal) => {
    try {
      process.kill(-child.pid, signal);
    } catch {} // It has ended already.
  };
  const stop = () => {
    kill('SIGTERM');
    setTimeout(() => kill('SIGKILL'), Math.min(run.graceMs, STOP_MS));
  };
  run.signal.addEventListener('abort', stop, { once: true });
  child.once('exit', () => kill('SIGKILL')); // What it left in the background would keep the pipe, and outlive the run.
  let preview = '';
  for await (const text of child.stdout.setEncoding('utf8')) {
    preview = (preview + text).slice(0, PREVIEW_CHARS_MAX);
    const message = text.trimEnd().split('\n').at(-1).slice(0, 200);
    await run.event('warning', { message, ext: { output: { stream: 'stdout', text } } });
  }
  const [code] = await closed;
  return { code, preview };
}
