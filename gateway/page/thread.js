// The versions of a conversation's messages: retries and edits keep all of them.
//
// `messages` has every version, by its key. `parent` of a message is the key of the message before
// it, "" for a first one, and `at` orders versions: milliseconds since the epoch, later than the
// parent's. `leaf` is the key of the last message that is shown, "" in an empty conversation. A deleted
// message is `removed`: what followed it follows the message before it.

/** An identifier that nothing else has; crypto.randomUUID needs https. */
export function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

/** The messages that are shown, from the first to the last. */
export function thread({ messages, leaf }) {
  const shown = [];
  for (let one = messages.get(leaf); one; one = messages.get(one.parent)) if (!one.removed) shown.push(one);
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
export function versions(conversation, message) {
  return after(conversation, before(conversation, message));
}

/** Delete messages that follow each other. After the last one that is shown, another version is shown. */
export function remove(conversation, gone) {
  const last = gone.includes(thread(conversation).at(-1));
  for (const one of gone) one.removed = true;
  if (!last) return;
  conversation.leaf = before(conversation, gone[0]);
  showLatest(conversation);
}

/** Show this version of a message, and the latest messages after it. */
export function choose(conversation, message) {
  conversation.leaf = message.key;
  showLatest(conversation);
}

/** Show the latest messages after the last one that is shown. */
export function showLatest(conversation) {
  for (let next; (next = after(conversation, conversation.leaf).at(-1)); ) conversation.leaf = next.key;
}

function after(conversation, key) {
  return visible(conversation).filter((one) => before(conversation, one) === key);
}

// The key of the message before this one, "" if there is none.
function before({ messages }, { parent }) {
  let one = messages.get(parent);
  while (one?.removed) one = messages.get(one.parent);
  return one?.key ?? "";
}

function visible({ messages }) {
  return [...messages.values()].filter(({ removed }) => !removed).sort((one, other) => one.at - other.at);
}

/** A conversation whose `messages` are a list, with positions in it instead of keys, as files have them. */
export function listed(conversation) {
  const all = visible(conversation);
  const place = (wanted) => all.findIndex(({ key }) => key === wanted);
  const parents = all.map((one) => place(before(conversation, one)));
  const messages = all.map(({ key, at, removed, ...one }, index) => ({ ...one, parent: parents[index] }));
  return { ...conversation, messages, leaf: place(thread(conversation).at(-1)?.key) };
}

/** The opposite of `listed`. */
export function linked({ messages, leaf, ...rest }) {
  const keys = messages.map(newId);
  const all = messages.map((one, at) => [keys[at], { ...one, key: keys[at], parent: keys[one.parent] ?? "", at }]);
  return { ...rest, messages: new Map(all), leaf: keys[leaf] ?? "" };
}
