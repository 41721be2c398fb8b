// Vercel's `ai` with `@ai-sdk/openai-compatible`: text, a stream, a tool, an object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "local",
  baseURL: `${process.argv[2]}/v1`,
  supportsStructuredOutputs: true,
});
const model = provider("tiny");
const plain = { local: { chat_template_kwargs: { enable_thinking: false } } };
const ask = (prompt, more = {}) => ({
  model,
  prompt,
  temperature: 0,
  maxRetries: 0,
  providerOptions: plain,
  ...more,
});
const results = {};

const text = await generateText(ask("Count to 5."));
results.text = text.text;
results.finish = text.finishReason;
results.usage = [text.usage.inputTokens, text.usage.outputTokens];

const stream = streamText(ask("Count to 40."));
results.streamed = "";
for await (const piece of stream.textStream) {
  results.streamed += piece;
}

const weather = tool({
  description: "Get the weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "18 degrees and sunny",
});
const called = await generateText(
  ask("What is the weather in Paris?", {
    tools: { get_weather: weather },
    stopWhen: stepCountIs(2),
  }),
);
results.call = called.steps[0].toolCalls.map((call) => [call.toolName, call.input]);
results.afterTool = called.text;

const streamedCall = streamText(
  ask("What is the weather in Paris?", { tools: { get_weather: weather }, stopWhen: stepCountIs(1) }),
);
results.streamedCall = (await streamedCall.toolCalls).map((call) => [call.toolName, call.input]);

const object = await generateObject(
  ask("What is the capital of France?", {
    schema: z.object({ country: z.string(), capital: z.string() }),
    maxOutputTokens: 200,
  }),
);
results.object = Object.keys(object.object).sort();

const thinking = await generateText(
  ask("What is 3 + 4?", {
    providerOptions: { local: { chat_template_kwargs: { enable_thinking: true } } },
  }),
);
results.reasoning = [thinking.reasoningText, thinking.text];

console.log(JSON.stringify(results));
