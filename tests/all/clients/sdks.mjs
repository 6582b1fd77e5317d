// Asks a gateway by the vendors' JavaScript SDKs: one JSON task a line on stdin, one JSON answer a line on stdout.
//
// A task is {front, way, url, ask}. The way says which part of the SDK reads the answer: `whole`, `stream` (its
// iterator), `helper` (its accumulator), `loop` and `loop-stream` (its runner of tools), `models` or `count`. The answer
// has what the SDK gave its user, in the script's words, or the name and words of the exception that it raised.

import readline from "node:readline";
import Anthropic from "@anthropic-ai/sdk";
import { GoogleGenAI } from "@google/genai";
import OpenAI from "openai";

const KEY = "dummy";
const MODEL = "m";
const ROUNDS_MAX = 5;

const openai = (url, maxRetries = 0) => new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries });
const anthropic = (url, maxRetries = 0) => new Anthropic({ baseURL: url, apiKey: KEY, maxRetries });
const google = (url) => new GoogleGenAI({ apiKey: KEY, httpOptions: { baseUrl: url } });

const heard = (text, reasoning, calls, input, output, cacheRead, stop, more = {}) =>
  ({ text, reasoning, calls, input, output, cache_read: cacheRead, stop, ...more });

async function collect(iterator) {
  const found = [];
  for await (const one of iterator) found.push(one);
  return found;
}

// OpenAI: Chat --------------------------------------------------------------------------------------------------------

function chatQuestion({ text, image, tools, think, model = MODEL }) {
  const picture = { type: "image_url", image_url: { url: `data:image/png;base64,${image}` } };
  return {
    model,
    messages: [{ role: "user", content: image ? [{ type: "text", text }, picture] : text }],
    ...(tools && { tools: tools.map((tool) => ({ type: "function", function: tool })) }),
    ...(think && { reasoning_effort: "high" }),
  };
}

function chatHeard({ choices, usage }, more) {
  const { message, finish_reason: stop } = choices[0];
  const calls = (message.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  return heard((message.content ?? "") + (message.refusal ?? ""), message.reasoning_content ?? "", calls,
    usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details?.cached_tokens ?? 0, stop, more);
}

async function chatStream(client, question) {
  const chunks = await collect(await client.chat.completions.create(question));
  const message = { content: "", refusal: "", reasoning_content: "", tool_calls: [] };
  for (const delta of chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta)) {
    for (const name of ["content", "refusal", "reasoning_content"]) message[name] += delta[name] ?? "";
    for (const { index, function: part } of delta.tool_calls ?? []) {
      const call = (message.tool_calls[index] ??= { function: { name: "", arguments: "" } });
      for (const name of ["name", "arguments"]) call.function[name] += part?.[name] ?? "";
    }
  }
  const last = chunks.findLast((chunk) => chunk.choices[0]?.finish_reason).choices[0];
  const { usage } = chunks.findLast((chunk) => chunk.usage);
  return chatHeard({ choices: [{ message, finish_reason: last.finish_reason }], usage }, { chunks: chunks.length });
}

const chat = {
  models: async (url) => ({ names: (await collect(openai(url).models.list())).map((model) => model.id) }),
  whole: async (url, ask) => chatHeard(await openai(url, ask.retries).chat.completions.create(chatQuestion(ask))),
  stream: (url, ask) => chatStream(openai(url),
    { ...chatQuestion(ask), stream: true, stream_options: { include_usage: true } }),
  helper: async (url, ask) => {
    const stream = openai(url).chat.completions.stream(
      { ...chatQuestion(ask), stream_options: { include_usage: true } });
    let reasoning = ""; // The accumulator keeps the last piece of a member that is no part of its interface.
    stream.on("chunk", ({ choices }) => (reasoning += choices[0]?.delta.reasoning_content ?? ""));
    return chatHeard(await stream.finalChatCompletion(), { reasoning });
  },
  loop: (url, ask, stream) => loop(ask, async (run) => {
    const tools = ask.tools.map((tool) => ({ type: "function",
      function: { ...tool, parse: JSON.parse, function: (input) => run(tool.name, input) } }));
    const runner = openai(url).chat.completions.runTools({ ...chatQuestion(ask), tools, stream });
    return await runner.finalContent();
  }),
};

// OpenAI: Responses ---------------------------------------------------------------------------------------------------

function responsesQuestion({ text, image, tools, think, model = MODEL }) {
  const picture = { type: "input_image", detail: "auto", image_url: `data:image/png;base64,${image}` };
  const content = [{ type: "input_text", text }, ...(image ? [picture] : [])];
  return {
    model,
    input: [{ role: "user", content }],
    ...(tools && { tools: tools.map((tool) => ({ type: "function", strict: false, ...tool })) }),
    ...(think && { reasoning: { effort: "high", summary: "auto" } }),
  };
}

function responsesHeard(answer, more) {
  const parts = (kind, name) => answer.output.filter((item) => item.type === kind).flatMap((item) => item[name]);
  const calls = answer.output.filter((item) => item.type === "function_call");
  return heard(
    parts("message", "content").map((part) => part.text ?? part.refusal).join(""),
    parts("reasoning", "summary").map((part) => part.text).join(""),
    calls.map((call) => [call.name, JSON.parse(call.arguments)]),
    answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens,
    answer.incomplete_details?.reason ?? answer.status, more);
}

const responses = {
  models: async (url) => ({ names: [(await openai(url).models.retrieve(MODEL)).id] }),
  whole: async (url, ask) => responsesHeard(await openai(url, ask.retries).responses.create(responsesQuestion(ask))),
  stream: async (url, ask) => {
    const events = await collect(await openai(url).responses.create({ ...responsesQuestion(ask), stream: true }));
    if (events.some((event, place) => event.sequence_number !== place)) throw new Error("events are numbered wrongly");
    const { response } = events.at(-1);
    const said = (...kinds) => events.filter((event) => kinds.includes(event.type)).map((event) => event.delta).join("");
    const text = said("response.output_text.delta", "response.refusal.delta");
    return { ...responsesHeard(response, { chunks: events.length }), text };
  },
  helper: async (url, ask) =>
    responsesHeard(await openai(url).responses.stream(responsesQuestion(ask)).finalResponse()),
  loop: (url, ask, stream) => loop(ask, async (run) => {
    const client = openai(url);
    const { input, ...question } = responsesQuestion(ask);
    for (let round = 0; round < ROUNDS_MAX; round++) {
      const sent = { ...question, input };
      const answer = stream ? await client.responses.stream(sent).finalResponse() : await client.responses.create(sent);
      input.push(...answer.output);
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (!calls.length) return answer.output_text;
      for (const { name, arguments: text, call_id } of calls)
        input.push({ type: "function_call_output", call_id, output: run(name, JSON.parse(text)) });
    }
  }),
};

// Anthropic: Messages -------------------------------------------------------------------------------------------------

function messagesQuestion({ text, image, tools, think, model = MODEL }) {
  const picture = { type: "image", source: { type: "base64", media_type: "image/png", data: image } };
  return {
    model,
    max_tokens: 4000,
    messages: [{ role: "user", content: [{ type: "text", text }, ...(image ? [picture] : [])] }],
    ...(tools && { tools: tools.map(({ parameters, ...tool }) => ({ ...tool, input_schema: parameters })) }),
    ...(think && { thinking: { type: "enabled", budget_tokens: 2000 } }),
  };
}

function messagesHeard(answer, more) {
  const said = (kind) => answer.content.filter((block) => block.type === kind).map((block) => block[kind]).join("");
  const calls = answer.content.filter((block) => block.type === "tool_use");
  const { input_tokens, output_tokens, cache_read_input_tokens, cache_creation_input_tokens } = answer.usage;
  return heard(said("text"), said("thinking"), calls.map((call) => [call.name, call.input]),
    input_tokens + (cache_read_input_tokens ?? 0) + (cache_creation_input_tokens ?? 0), output_tokens,
    cache_read_input_tokens ?? 0, answer.stop_reason, more);
}

async function messagesStream(client, question) {
  const events = await collect(await client.messages.create({ ...question, stream: true }));
  const answer = { content: [], usage: {} };
  for (const event of events) {
    if (event.type === "message_start") Object.assign(answer.usage, event.message.usage);
    if (event.type === "content_block_start") answer.content[event.index] = { json: "", ...event.content_block };
    if (event.type === "content_block_delta")
      for (const [kind, name] of [["text", "text"], ["thinking", "thinking"], ["partial_json", "json"]])
        if (kind in event.delta) answer.content[event.index][name] += event.delta[kind];
    if (event.type === "message_delta") {
      answer.stop_reason = event.delta.stop_reason;
      for (const [name, value] of Object.entries(event.usage)) answer.usage[name] = value ?? answer.usage[name];
    }
  }
  for (const block of answer.content) if (block.type === "tool_use") block.input = JSON.parse(block.json || "{}");
  return messagesHeard(answer, { chunks: events.length });
}

const messages = {
  models: async (url) => ({ names: (await collect(anthropic(url).models.list())).map((model) => model.id) }),
  count: async (url, ask) => {
    const { max_tokens, ...question } = messagesQuestion(ask);
    return { count: (await anthropic(url).messages.countTokens(question)).input_tokens };
  },
  whole: async (url, ask) => messagesHeard(await anthropic(url, ask.retries).messages.create(messagesQuestion(ask))),
  stream: (url, ask) => messagesStream(anthropic(url), messagesQuestion(ask)),
  helper: async (url, ask) => messagesHeard(await anthropic(url).messages.stream(messagesQuestion(ask)).finalMessage()),
  loop: (url, ask, stream) => loop(ask, async (run) => {
    const question = messagesQuestion(ask);
    const tools = question.tools.map((tool) => ({ ...tool, run: (input) => run(tool.name, input) }));
    const runner = anthropic(url).beta.messages.toolRunner({ ...question, tools, stream, max_iterations: ROUNDS_MAX });
    const last = await runner.runUntilDone();
    return last.content.filter((block) => block.type === "text").map((block) => block.text).join("");
  }),
};

// Google: generateContent ---------------------------------------------------------------------------------------------

function geminiQuestion({ text, image, tools, think, model = MODEL }) {
  const picture = { inlineData: { mimeType: "image/png", data: image } };
  const offered = tools?.map(({ parameters, ...tool }) => ({ ...tool, parametersJsonSchema: parameters }));
  return {
    model,
    contents: [{ role: "user", parts: [{ text }, ...(image ? [picture] : [])] }],
    config: {
      ...(offered && { tools: [{ functionDeclarations: offered }] }),
      ...(think && { thinkingConfig: { includeThoughts: true, thinkingBudget: 2000 } }),
    },
  };
}

function geminiHeard(answers) {
  const parts = answers.flatMap((answer) => answer.candidates?.[0]?.content?.parts ?? []);
  const said = (isThought) => parts.filter((part) => !!part.thought === isThought).map((part) => part.text ?? "").join("");
  const { usageMetadata: usage, candidates } = answers.at(-1);
  const calls = answers.flatMap((answer) => answer.functionCalls ?? []);
  return heard(said(false), said(true), calls.map((call) => [call.name, call.args ?? {}]), usage.promptTokenCount,
    (usage.candidatesTokenCount ?? 0) + (usage.thoughtsTokenCount ?? 0), usage.cachedContentTokenCount ?? 0,
    candidates[0].finishReason, { chunks: answers.length });
}

const gemini = {
  models: async (url) => ({ names: (await collect(await google(url).models.list())).map((model) => model.name) }),
  count: async (url, ask) => {
    const { config, ...question } = geminiQuestion(ask);
    return { count: (await google(url).models.countTokens(question)).totalTokens };
  },
  whole: async (url, ask) => geminiHeard([await google(url).models.generateContent(geminiQuestion(ask))]),
  stream: async (url, ask) =>
    geminiHeard(await collect(await google(url).models.generateContentStream(geminiQuestion(ask)))),
  helper: async (url, ask) => {
    const { contents, ...question } = geminiQuestion(ask);
    const talk = google(url).chats.create(question);
    return geminiHeard(await collect(await talk.sendMessageStream({ message: contents[0].parts })));
  },
  loop: (url, ask, stream) => loop(ask, async (run) => {
    const question = geminiQuestion(ask);
    const [offered] = question.config.tools;
    const answers = (calls) => calls.map(({ id, name, args }) =>
      ({ functionResponse: { ...(id && { id }), name, response: { output: run(name, args) } } }));
    const tool = { tool: async () => offered, callTool: async (calls) => answers(calls) };
    const config = { ...question.config, tools: [tool] };
    const { models } = google(url);
    if (!stream) return (await models.generateContent({ ...question, config })).text;
    const chunks = await collect(await models.generateContentStream({ ...question, config }));
    return chunks.map((chunk) => chunk.text ?? "").join("");
  }),
};

// -------------------------------------------------------------------------------------------------------------------

async function loop(ask, work) {
  const ran = [];
  const text = await work((name, input) => {
    ran.push([name, input]);
    return `result of ${name}`;
  });
  return { text, ran };
}

const FRONTS = { openai_compatible: chat, openai_responses: responses, anthropic: messages, gemini_ai_studio: gemini };

for await (const line of readline.createInterface({ input: process.stdin })) {
  const { front, way, url, ask } = JSON.parse(line);
  const [name, stream] = way === "loop-stream" ? ["loop", true] : [way, false];
  let answer;
  try {
    answer = await FRONTS[front][name](url, ask, stream);
  } catch (error) {
    answer = { error: error.constructor.name, message: String(error.message), stack: String(error.stack) };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
}
