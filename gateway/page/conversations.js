// The conversations of this browser: at most MOST of them, in localStorage, one key for each.
//
// A conversation is {id, title, updated, messages}; a message is one of
//   {role: "user", content, images: [data URI]}
//   {role: "assistant", content, reasoning, calls: [{id, name, arguments}], state, error, facts}
//   {role: "tool", id, content}
// with `state` one of running, done, stopped, failed.

const PREFIX = "chat:";
const MOST = 50;
const TITLE_LENGTH = 60;

export class Conversations {
  /** Reads what is kept. `lost` is told, as a sentence, when something could not be. */
  constructor(lost) {
    this.lost = lost;
    this.all = [];
    for (const key of keys()) {
      try {
        const kept = JSON.parse(localStorage.getItem(key));
        if (!kept.id || !Array.isArray(kept.messages)) throw new Error("not a conversation");
        this.all.push(kept);
      } catch {
        localStorage.removeItem(key);
      }
    }
    for (const { messages } of this.all) messages.forEach(settle);
    this.#sort();
  }

  /** A new conversation; it is kept from its first message on. */
  begin() {
    return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", updated: 0, messages: [] };
  }

  /** Keep a conversation as it is now, for which the oldest ones may have to go. */
  keep(conversation) {
    conversation.updated = Date.now();
    conversation.title ||= titleOf(conversation.messages);
    if (!this.all.includes(conversation)) this.all.push(conversation);
    this.#sort();
    for (const old of this.all.slice(MOST)) this.remove(old);
    const text = JSON.stringify(conversation);
    for (;;) {
      try {
        localStorage.setItem(PREFIX + conversation.id, text);
        return;
      } catch {
        const oldest = this.all[this.all.length - 1];
        if (oldest === conversation) break;
        this.remove(oldest);
      }
    }
    localStorage.removeItem(PREFIX + conversation.id);
    this.lost("This conversation has outgrown the browser’s storage: it is gone when the page closes.");
  }

  remove(conversation) {
    this.all = this.all.filter((one) => one !== conversation);
    localStorage.removeItem(PREFIX + conversation.id);
  }

  removeAll() {
    for (const key of keys()) localStorage.removeItem(key);
    this.all = [];
  }

  #sort() {
    this.all.sort((one, other) => other.updated - one.updated);
  }
}

function keys() {
  return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
}

// The page was closed in the middle of this answer.
function settle(message) {
  if (message.state === "running") message.state = "stopped";
}

function titleOf(messages) {
  const first = messages[0]?.content.trim().replace(/\s+/g, " ") || "An image";
  return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH - 1)}…` : first;
}
