// Builds one message from the chunks of a streamed answer.

/** An answer of a model before its first chunk; it continues the content and reasoning of another. */
export function begun(model, { content = "", reasoning = "" } = {}) {
  return { role: "assistant", content, reasoning, calls: [], state: "running", facts: {}, model };
}

/** Adds chunks to a message and measures times, all in seconds. */
export class Reader {
  #message;
  #started = performance.now();
  #first = 0;
  #firstThought = 0;
  #pieces = 0;

  constructor(message) {
    this.#message = message;
  }

  /** Add one chunk (API reference, "The chat completion chunk object"). */
  add(chunk) {
    const { facts } = this.#message;
    const now = performance.now();
    for (const { delta = {}, finish_reason: finish } of chunk.choices) {
      const thought = delta.reasoning_content ?? delta.reasoning ?? "";
      const content = delta.content ?? delta.refusal ?? "";
      if (thought || content || delta.tool_calls) {
        this.#first ||= now;
        this.#pieces += 1;
      }
      if (thought) this.#firstThought ||= now;
      if ((content || delta.tool_calls || finish) && this.#firstThought) {
        facts.thought ??= (now - this.#firstThought) / 1000;
      }
      this.#message.reasoning += thought;
      this.#message.content += content;
      for (const piece of delta.tool_calls ?? []) this.#addCall(piece);
      if (finish) facts.finish = finish;
    }
    if (this.#first) facts.first ??= (this.#first - this.#started) / 1000;
    if (chunk.usage) this.#count(chunk.usage, now);
  }

  #addCall({ index, id, function: called = {} }) {
    const call = (this.#message.calls[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    if (called.name) call.name = called.name;
    call.arguments += called.arguments ?? "";
  }

  // The first token counts as prefill, so one token less remains. Text that arrived all at once, as
  // tool calls do, does not show the time between tokens.
  #count({ prompt_tokens: asked, completion_tokens: tokens }, now) {
    const { facts } = this.#message;
    facts.tokens = tokens;
    facts.context = asked + tokens;
    const steady = this.#pieces > 1 && this.#pieces * 4 >= tokens;
    if (steady && now > this.#first) facts.rate = ((tokens - 1) * 1000) / (now - this.#first);
  }
}
