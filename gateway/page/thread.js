// The versions of a conversation's messages: retries and edits keep all of them.
//
// `messages` has every version, in the order of creation. `parent` of a message is the index of the
// message before it, -1 for a first one. `leaf` is the index of the last message that is shown, -1 in
// an empty conversation.

/** The messages that are shown, from the first to the last. */
export function thread({ messages, leaf }) {
  const shown = [];
  for (let at = leaf; at >= 0; at = messages[at].parent) shown.push(messages[at]);
  return shown.reverse();
}

/** Add a message after the last one that is shown. */
export function add(conversation, message) {
  message.parent = conversation.leaf;
  conversation.leaf = conversation.messages.push(message) - 1;
}

/** Show only the messages before this one; the next added message is another version of it. */
export function cut(conversation, message) {
  conversation.leaf = message.parent;
}

/** Every version of a message, the oldest first. */
export function versions({ messages }, { parent }) {
  return messages.filter((one) => one.parent === parent);
}

/** Show this version of a message, and the latest messages after it. */
export function choose(conversation, message) {
  const { messages } = conversation;
  conversation.leaf = messages.indexOf(message);
  for (;;) {
    const next = messages.findLastIndex(({ parent }) => parent === conversation.leaf);
    if (next < 0) return;
    conversation.leaf = next;
  }
}
