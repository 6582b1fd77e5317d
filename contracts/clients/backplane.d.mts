// Types of backplane.mjs. The full shapes are generated from schemas/ by any generator; these are the ones used here.

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

export interface WorkOrder {
  task: string;
  id?: string;
  lane?: 'patch_first' | 'workspace_first';
  workspace?: { root?: string; mode?: 'staged' | 'pass_through'; include?: string[]; exclude?: string[] };
  context?: { files?: string[]; snippets?: { name: string; content: string }[] };
  policy?: {
    allowed_tools?: string[];
    disallowed_tools?: string[];
    deny_read?: string[];
    deny_write?: string[];
    allow_network?: string[];
    deny_network?: string[];
    require_approval_for?: string[];
  };
  requirements?: { required?: { capability: string; min_support: 'native' | 'emulated' | 'any' }[] };
  config?: {
    model?: string | null;
    vendor?: { [name: string]: Json };
    env?: { [name: string]: string };
    max_budget_usd?: number | null;
    max_turns?: number | null;
  };
}

export interface AgentEvent {
  ts: string;
  type: string;
  ext?: { [name: string]: Json };
  [member: string]: Json | undefined;
}

export interface Receipt {
  meta: {
    run_id: string;
    work_order_id: string;
    contract_version: string;
    started_at: string;
    finished_at: string;
    duration_ms: number;
  };
  backend: { id: string; backend_version: string | null; adapter_version: string | null };
  capabilities: { [name: string]: Json };
  mode: 'mapped' | 'passthrough';
  usage_raw: { backplane: { [name: string]: Json }; [name: string]: Json };
  usage: { [counter: string]: number | null };
  /** Empty when the end said that the trace is as streamed. */
  trace: AgentEvent[];
  artifacts: { kind: string; path: string }[];
  verification: { harness_ok: boolean; git_diff: string | null; git_status: string | null };
  outcome: 'complete' | 'partial' | 'failed';
  receipt_sha256: string;
}

export interface Ask {
  id: string;
  ref_id: string;
  kind: 'tool' | 'patch' | 'input' | 'result';
  name?: string;
  input?: Json;
  question?: string;
  options?: Json[];
  diff?: string;
  files?: string[];
  output?: Json;
  is_error?: boolean;
  [member: string]: Json | undefined;
}

export interface Answer {
  decision: 'allow' | 'deny' | 'modify';
  reason?: string;
  /** With `modify`: the tool input to use instead. */
  input?: Json;
  /** The answer to a question, or with `modify` the output to show instead. */
  text?: string;
  remember?: 'once' | 'run';
}

export interface End {
  t: 'final' | 'fatal';
  error?: string;
  /** One of the codes of errors.md; `backend_crashed` when the server itself went away. */
  errorCode?: string;
  /** Absent only when the server went away or could not take the order up. */
  receipt?: Receipt;
  /** The receipt's canonical bytes. */
  bytes?: Uint8Array;
  /** The streamed events' bytes, when they are needed to verify. */
  events?: Uint8Array[];
  verified: boolean;
}

export interface Run extends AsyncIterable<{ event: AgentEvent; bytes: Uint8Array }> {
  readonly id: string;
  cancel(reason?: string | null, graceMs?: number): Promise<void>;
  end(): Promise<End>;
}

export interface Client {
  readonly hello: { contract_version: string; backends?: { id: string; ready: boolean; capabilities: Json }[] };
  readonly problems: { error: string; error_code?: string }[];
  readonly pid: number;
  submit(order: WorkOrder, options?: { onAsk?: (ask: Ask) => Answer | Promise<Answer> }): Promise<Run>;
  ping(): Promise<void>;
  close(): Promise<void>;
}

export class BackplaneError extends Error {
  readonly code: string;
  constructor(code: string, message: string);
}

export function connect(options?: {
  command?: string[];
  cwd?: string;
  env?: { [name: string]: string | undefined };
}): Promise<Client>;

export function verify(bytes: Uint8Array, events?: Uint8Array[]): boolean;
