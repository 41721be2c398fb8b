// Builds the body of a chat completion from a conversation and its settings.

import { ApiFailure } from "./api.js";

/** The settings that are fields of the request, by name. */
export const FIELDS = ["system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "thinking", "tools"];
export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/**
 * The body for the next answer of `model`, which may have begun. An empty setting is not sent: the
 * model's default applies. Throws ApiFailure if the tools are invalid.
 */
export function requestOf(messages, settings, { model, content, reasoning }) {
  const body = { model, messages: answered(messages).map(wireMessage) };
  if (settings.system?.trim()) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of NUMBERS) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  const wrong = wrongTools(settings.tools);
  if (wrong) throw new ApiFailure(wrong);
  if (settings.tools?.trim()) body.tools = JSON.parse(settings.tools);
  if (content) {
    body.messages.push({ role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) });
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  }
  return body;
}

/** What is wrong with the text of the tools; null if nothing is. */
export function wrongTools(text) {
  if (!text?.trim()) return null;
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) return "Tools: write a list, in square brackets.";
    const nameless = tools.findIndex((tool) => !tool?.function?.name);
    return nameless < 0 ? null : `Tools: entry ${nameless + 1} has no function.name.`;
  } catch (error) {
    return `Tools: this is not JSON (${error.message}).`;
  }
}

// A question that was refused, or stopped before any text arrived, is not sent again with the next
// one: an image that the model does not accept would make every later question fail too.
function answered(messages) {
  const kept = [];
  for (const message of messages) {
    if (message.role === "assistant" && isEmpty(message)) {
      while (kept.length && kept.pop().role !== "user");
    } else {
      kept.push(message);
    }
  }
  return kept;
}

function isEmpty(message) {
  return !message.content && !message.reasoning && !message.calls.length;
}

function wireMessage(message) {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.id, content: message.content };
  }
  if (message.role === "assistant") {
    if (!message.calls.length) return { role: "assistant", content: message.content };
    return {
      role: "assistant",
      content: message.content || null,
      ...(message.reasoning && { reasoning_content: message.reasoning }),
      tool_calls: message.calls.map(({ id, name, arguments: given }) => ({
        id,
        type: "function",
        function: { name, arguments: given },
      })),
    };
  }
  const files = (message.files ?? []).map(({ name, text }) => `File “${name}”:\n\n${text}\n\nEnd of file “${name}”.`);
  const content = [...files, message.content].filter(Boolean).join("\n\n");
  if (!message.images?.length) return { role: "user", content };
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...images, ...(content ? [{ type: "text", text: content }] : [])] };
}
