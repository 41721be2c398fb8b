// The `openai` SDK for JavaScript: a chat, a stream that is left half-way, a refusal.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused", maxRetries: 0 });
const ask = (text, more = {}) =>
  client.chat.completions.create({
    model: "tiny",
    temperature: 0,
    messages: [{ role: "user", content: text }],
    chat_template_kwargs: { enable_thinking: false },
    ...more,
  });
const results = {};

results.text = (await ask("Count to 5.")).choices[0].message.content;
results.streamed = "";
for await (const chunk of await ask("Count to 5.", { stream: true })) {
  results.streamed += chunk.choices[0]?.delta.content ?? "";
}
for await (const chunk of await ask("Count to 60.", { stream: true })) {
  if (chunk.choices[0]?.delta.content) break;
}
try {
  await ask("Hi", { model: "nobody" });
} catch (error) {
  results.refused = [error.status, error.code, error.param];
}
console.log(JSON.stringify(results));
