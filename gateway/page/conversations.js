// The conversations of this browser, the latest first.
//
// A conversation is {id, title, updated, settings, messages, leaf}; a message is one of
//   {role: "user", content, images: [data URI], files: [{name, text}]}
//   {role: "assistant", content, reasoning, calls: [{id, name, arguments}], state, error, facts, model}
//   {role: "tool", id, content}
// with `state` one of running, done, stopped, failed. thread.js explains the map `messages`, `leaf`,
// and the `key`, `parent` and `at` of a message.

import * as store from "./store.js";
import { newId, showLatest } from "./thread.js";

const TITLE_LENGTH = 60;

export class Conversations {
  #stored = new WeakMap(); // by stored message, whether it was stored as a deleted one
  #act;

  /**
   * `act`: `lost(sentence)` is called if something could not be stored; `removed(conversation)` and
   * `changed(conversation, messagesToo)` after a change in another tab.
   */
  constructor(act) {
    this.#act = act;
    this.all = [];
    this.blocked = false; // whether the browser does not allow storage
  }

  /** Read the stored conversations. */
  async read() {
    try {
      const [records, messages] = await store.all((change) => this.#changed(change));
      for (const message of messages) {
        // Its page was closed while it was generated, or another tab is about to complete it.
        if (message.state === "running") message.state = "stopped";
      }
      messages.sort((one, other) => one.at - other.at);
      const own = Map.groupBy(messages, ({ conversation }) => conversation);
      for (const record of records) this.#merge(record, own.get(record.id) ?? []);
    } catch {
      this.blocked = true;
    }
    this.#sort();
  }

  /** A new conversation with these settings; it is stored with its first message. */
  begin(settings) {
    return { id: newId(), title: "", updated: 0, settings: { ...settings }, messages: new Map(), leaf: "" };
  }

  /** Store a conversation with its new messages and the changed one, and put it first in the list. */
  async keep(conversation, message) {
    conversation.updated = Date.now();
    conversation.title ||= titleOf(conversation);
    await this.#put(conversation, message);
  }

  async rename(conversation, title) {
    conversation.title = title.trim().slice(0, TITLE_LENGTH) || titleOf(conversation);
    await this.#put(conversation);
  }

  /** Store what else was changed in a conversation, if the conversation is stored. */
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
      if (there) this.remove([there]);
      await this.#put(conversation);
      added += 1;
    }
    return added;
  }

  /** The conversations that contain a text, in upper or lower case; all of them for an empty text. */
  find(text) {
    const wanted = text.trim().toLowerCase();
    const holds = (other) => other?.toLowerCase().includes(wanted);
    return this.all.filter(({ title, messages }) => holds(title) || [...messages.values()].some(({ content, removed }) => !removed && holds(content)));
  }

  remove(conversations) {
    this.all = this.all.filter((one) => !conversations.includes(one));
    store.remove(conversations.map(({ id }) => id)).catch(() => {});
  }

  /** Undo `remove`. */
  restore(conversations) {
    for (const conversation of conversations) {
      for (const message of conversation.messages.values()) {
        this.#stored.delete(message);
        if (message.state === "running") message.state = "stopped"; // in a tab that has stopped it
      }
      this.#put(conversation);
    }
  }

  async #put(conversation, changed) {
    if (!this.all.includes(conversation)) this.all.push(conversation);
    this.#sort();
    const messages = [...conversation.messages.values()].filter((one) => one === changed || this.#stored.get(one) !== Boolean(one.removed));
    try {
      await store.put(conversation, messages.map(withoutDeleted));
      for (const message of messages) this.#stored.set(message, Boolean(message.removed));
    } catch {
      for (const message of messages) this.#stored.delete(message); // they are stored with the next change
      if (!this.blocked) this.#act.lost("The browser’s storage is full: this conversation will be lost when the tab closes. Export it, or delete others.");
    }
  }

  // A change in another tab.
  #changed({ record, messages, removed }) {
    for (const one of removed ? this.all.filter(({ id }) => removed.includes(id)) : []) {
      this.all.splice(this.all.indexOf(one), 1);
      this.#act.removed(one);
    }
    if (!record) return;
    const conversation = this.#merge(record, messages);
    this.#sort();
    this.#act.changed(conversation, messages.length > 0);
  }

  // Add a record and messages to the conversation here, which shows its own thread and what follows it.
  #merge({ leaf, ...record }, messages) {
    let conversation = this.all.find(({ id }) => id === record.id);
    if (!conversation) this.all.push((conversation = { leaf, messages: new Map() }));
    Object.assign(conversation, record);
    for (const { conversation: _, ...given } of messages) {
      const message = Object.assign(conversation.messages.get(given.key) ?? {}, given);
      conversation.messages.set(message.key, message);
      this.#stored.set(message, Boolean(message.removed));
    }
    if (conversation.messages.get(conversation.leaf)?.removed) conversation.leaf = leaf;
    showLatest(conversation);
    return conversation;
  }

  #sort() {
    this.all.sort((one, other) => other.updated - one.updated);
  }
}

// What the browser stores of a deleted message: its position in the conversation.
function withoutDeleted(message) {
  const { key, parent, at, role, removed } = message;
  return removed ? { key, parent, at, role, removed, content: "" } : message;
}

function titleOf({ messages }) {
  const { content, files } = [...messages.values()].find(({ removed }) => !removed) ?? { content: "" };
  const first = content.trim().replace(/\s+/g, " ") || files?.[0]?.name || "An image";
  return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH - 1)}…` : first;
}
