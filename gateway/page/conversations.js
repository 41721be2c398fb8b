// The conversations of this browser, the latest first.
//
// A conversation is {id, title, updated, settings, messages, leaf}; a message is one of
//   {role: "user", content, images: [data URI], files: [{name, text}]}
//   {role: "assistant", content, reasoning, calls: [{id, name, arguments}], state, error, facts}
//   {role: "tool", id, content}
// with `state` one of running, done, stopped, failed. thread.js explains `parent` of a message, and
// `leaf`.

import * as store from "./store.js";

const TITLE_LENGTH = 60;

export class Conversations {
  /** `lost` is called with a sentence if something could not be stored. */
  constructor(lost) {
    this.lost = lost;
    this.all = [];
  }

  /** Read the stored conversations. */
  async read() {
    try {
      this.all = await store.all();
    } catch {
      this.lost("This browser cannot save conversations: they are lost when the page closes.");
    }
    for (const { messages } of this.all) messages.forEach(settle);
    this.#sort();
  }

  /** A new conversation with these settings; it is stored with its first message. */
  begin(settings) {
    return { id: newId(), title: "", updated: 0, settings: { ...settings }, messages: [], leaf: -1 };
  }

  /** Store a conversation, and put it first in the list. */
  async keep(conversation) {
    conversation.updated = Date.now();
    conversation.title ||= titleOf(conversation.messages);
    await this.#put(conversation);
  }

  async rename(conversation, title) {
    conversation.title = title.trim().slice(0, TITLE_LENGTH) || titleOf(conversation.messages);
    await this.#put(conversation);
  }

  /** Store the changed settings of a conversation, if the conversation is stored. */
  async change(conversation) {
    if (this.all.includes(conversation)) await this.#put(conversation);
  }

  /**
   * Store imported conversations. One that is already stored is replaced only by a newer version.
   * Returns how many were stored.
   */
  async take(conversations) {
    let added = 0;
    for (const conversation of conversations) {
      const there = this.all.find(({ id }) => id === conversation.id);
      if (there && there.updated >= conversation.updated) continue;
      if (there) this.all.splice(this.all.indexOf(there), 1);
      await this.#put(conversation);
      added += 1;
    }
    return added;
  }

  /** The conversations that contain a text, in upper or lower case; all of them for an empty text. */
  find(text) {
    const wanted = text.trim().toLowerCase();
    const holds = (other) => other?.toLowerCase().includes(wanted);
    return this.all.filter(({ title, messages }) => holds(title) || messages.some(({ content }) => holds(content)));
  }

  remove(conversation) {
    this.all = this.all.filter((one) => one !== conversation);
    store.remove(conversation.id).catch(() => {});
  }

  removeAll() {
    this.all = [];
    store.clear().catch(() => {});
  }

  async #put(conversation) {
    if (!this.all.includes(conversation)) this.all.push(conversation);
    this.#sort();
    try {
      await store.put(conversation);
    } catch {
      this.lost("The browser’s storage is full: this conversation is lost when the page closes. Export it, or delete others.");
    }
  }

  #sort() {
    this.all.sort((one, other) => other.updated - one.updated);
  }
}

/** An identifier that no other conversation has; crypto.randomUUID needs https. */
export function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

// Mark an answer as stopped if the page was closed while it was generated.
function settle(message) {
  if (message.state === "running") message.state = "stopped";
}

function titleOf(messages) {
  const { content, files } = messages[0];
  const first = content.trim().replace(/\s+/g, " ") || files?.[0]?.name || "An image";
  return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH - 1)}…` : first;
}
