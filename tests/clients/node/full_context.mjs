// pi-ai, the library of pi and OpenClaw: which errors it takes for a full context, by API.

import { complete, isContextOverflow } from "@earendil-works/pi-ai";

const [url, tokens] = process.argv.slice(2);
const content = "tick ".repeat(Number(tokens));
const found = {};
for (const [api, path] of [
  ["openai-completions", "/v1"],
  ["openai-responses", "/v1"],
  ["anthropic-messages", ""],
]) {
  const model = {
    id: "tiny",
    name: "tiny",
    api,
    provider: "local",
    baseUrl: url + path,
    reasoning: false,
    input: ["text"],
    cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
    contextWindow: 1024,
    maxTokens: 64,
  };
  const messages = [{ role: "user", content, timestamp: 0 }];
  const answer = await complete(model, { messages }, { apiKey: "unused", maxRetries: 0 });
  found[api] = [answer.stopReason, isContextOverflow(answer, model.contextWindow)];
}
console.log(JSON.stringify(found));
