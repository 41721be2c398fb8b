// The versions of a conversation's messages: a retry or an edit loses none of them.
//
// `messages` holds every version in the order in which they were written; `parent` of each is the
// place of the message before it, -1 for a first one. `leaf` is the place of the last message that is
// shown, -1 in an empty conversation.

/** The messages that are shown, from the first to the last. */
export function thread({ messages, leaf }) {
  const shown = [];
  for (let at = leaf; at >= 0; at = messages[at].parent) shown.push(messages[at]);
  return shown.reverse();
}

/** Add a message to the end of what is shown. */
export function add(conversation, message) {
  message.parent = conversation.leaf;
  conversation.leaf = conversation.messages.push(message) - 1;
}

/** Show what comes before a message: what is added next is another version of it. */
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
