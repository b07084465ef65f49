// Three turns through the Vercel AI SDK, whose tool is run: a question, the tool's result, and one more question; whole or streamed.
// Prints a line of JSON: of each answer its thought, its text and its calls.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, packages, streamed] = process.argv.slice(2);
const load = async (name) => import(pathToFileURL(createRequire(`${packages}/`).resolve(name)));
const { generateText, jsonSchema, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const model = createOpenAICompatible({ name: "locret", baseURL: `${url}/v1` })("tiny");
const parameters = {
  type: "object", required: ["place"],
  properties: { place: { type: "string" }, days: { type: "integer" }, tide: { type: "boolean" } },
};
const tools = {
  depth: tool({ description: "How deep a harbour is", inputSchema: jsonSchema(parameters), execute: async () => "7 m" }),
};
const messages = [], answers = [];
for (const question of ["How deep?", "And now?"]) {
  messages.push({ role: "user", content: question });
  const asked = { model, messages, tools, temperature: 0, maxOutputTokens: 600, maxRetries: 0, stopWhen: stepCountIs(3) };
  const result = streamed === "true" ? streamText({ ...asked, onError: ({ error }) => { throw error; } }) : await generateText(asked);
  if (streamed === "true") await result.consumeStream();
  for (const step of await result.steps) {
    const calls = step.toolCalls.map(({ toolName, input }) => [toolName, input]);
    answers.push({ thought: step.reasoningText ?? "", text: step.text.trim(), calls });
  }
  messages.push(...(await result.response).messages);
}
console.log(JSON.stringify(answers));
