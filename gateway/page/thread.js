// The versions of a conversation's messages: retries and edits keep all of them.
//
// `messages` has every version, by its key. `parent` of a message is the key of the message before
// it, "" for a first one, and `at` orders versions: milliseconds since the epoch, later than the
// parent's. `leaf` is the key of the last message that is shown, "" in an empty conversation.

/** An identifier that nothing else has; crypto.randomUUID needs https. */
export function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

/** The messages that are shown, from the first to the last. */
export function thread({ messages, leaf }) {
  const shown = [];
  for (let one = messages.get(leaf); one; one = messages.get(one.parent)) shown.push(one);
  return shown.reverse();
}

/** Add a message after the last one that is shown. */
export function add(conversation, message) {
  const { messages, leaf } = conversation;
  const at = Math.max(Date.now(), (messages.get(leaf)?.at ?? 0) + 1);
  Object.assign(message, { key: newId(), parent: leaf, at });
  messages.set(message.key, message);
  conversation.leaf = message.key;
}

/** Show only the messages before this one; the next added message is another version of it. */
export function cut(conversation, message) {
  conversation.leaf = message.parent;
}

/** Every version of a message, the oldest first. */
export function versions(conversation, { parent }) {
  return after(conversation, parent);
}

/** Show this version of a message, and the latest messages after it. */
export function choose(conversation, message) {
  for (let next = message; next; next = after(conversation, next.key).at(-1)) conversation.leaf = next.key;
}

function after({ messages }, key) {
  return [...messages.values()].filter(({ parent }) => parent === key).sort((one, other) => one.at - other.at);
}

/** A conversation whose `messages` are a list, with places in it instead of keys, as files have them. */
export function listed({ messages, leaf, ...rest }) {
  const all = [...messages.values()].sort((one, other) => one.at - other.at);
  const place = (wanted) => all.findIndex(({ key }) => key === wanted);
  return { ...rest, messages: all.map(({ key, at, ...one }) => ({ ...one, parent: place(one.parent) })), leaf: place(leaf) };
}

/** The opposite of `listed`. */
export function linked({ messages, leaf, ...rest }) {
  const keys = messages.map(newId);
  const all = messages.map((one, at) => [keys[at], { ...one, key: keys[at], parent: keys[one.parent] ?? "", at }]);
  return { ...rest, messages: new Map(all), leaf: keys[leaf] ?? "" };
}
