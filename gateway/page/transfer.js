// Exports conversations to a file and imports them. A file may come from anywhere, so only known
// fields with the right types are imported.

import { FIELDS, NUMBERS } from "./request.js";
import { linked, listed, newId } from "./thread.js";

const FORMAT = "mlx-backend-chat";
const VERSION = 1;
const SETTINGS = [...FIELDS, "model"];
const STATES = ["done", "stopped", "failed"];
const FACTS = ["first", "tokens", "rate", "finish", "thought", "context", "edited"];

/** These conversations as the text of a file. */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: conversations.map(listed) }, null, 1);
}

/** The conversations in the text of a file. Throws an Error with a message for the user. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON: choose one that was exported here.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file contains no conversations of this page: choose one that was exported here.");
  }
  if (file.version !== VERSION) {
    throw new Error(`This file has version ${JSON.stringify(file.version)}, but this page reads version ${VERSION}.`);
  }
  return file.conversations.map((one, at) => {
    try {
      return linked(conversation(one));
    } catch {
      throw new Error(`Conversation ${at + 1} of this file is damaged: nothing was imported.`);
    }
  });
}

function conversation({ id, title, updated, settings = {}, messages, leaf }) {
  return {
    id: id === undefined ? newId() : text(id),
    title: text(title),
    updated: finite(updated),
    settings: Object.fromEntries(SETTINGS.filter((name) => name in settings).map((name) => [name, setting(name, settings[name])])),
    messages: messages.map(message),
    leaf: place(leaf, messages.length),
  };
}

function message(given, at) {
  const parent = place(given.parent, at);
  const content = text(given.content);
  if (given.role === "tool") return { role: "tool", parent, id: text(given.id), content };
  if (given.role === "user") {
    const files = (given.files ?? []).map((file) => ({ name: text(file.name), text: text(file.text) }));
    return { role: "user", parent, content, images: (given.images ?? []).map(image), files };
  }
  must(given.role === "assistant");
  const facts = FACTS.filter((name) => ["string", "number"].includes(typeof given.facts?.[name]));
  return {
    role: "assistant",
    parent,
    content,
    reasoning: text(given.reasoning ?? ""),
    calls: (given.calls ?? []).map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) })),
    state: STATES.includes(given.state) ? given.state : "stopped",
    facts: Object.fromEntries(facts.map((name) => [name, given.facts[name]])),
    ...(given.error !== undefined && { error: text(given.error) }),
    ...(given.model !== undefined && { model: text(given.model) }),
  };
}

function setting(name, value) {
  must(!NUMBERS.includes(name) || Number.isFinite(Number(value)));
  must(name !== "thinking" || ["", "on", "off"].includes(value));
  return text(value);
}

function must(condition) {
  if (!condition) throw new TypeError("invalid");
}

function text(value) {
  must(typeof value === "string");
  return value;
}

function finite(value) {
  must(Number.isFinite(value));
  return value;
}

// A parent comes before its message (or is -1), so no thread contains itself.
function place(value, before) {
  must(Number.isInteger(value) && value >= -1 && value < before);
  return value;
}

function image(value) {
  must(/^data:image\/(png|jpeg|webp|gif);base64,/.test(text(value)));
  return value;
}
