// Stores conversations in the browser's IndexedDB, and informs the page's other tabs of every change.
//
// Each message has a record of its own, so that two tabs never overwrite each other's messages.

import { linked } from "./thread.js";

const CONVERSATIONS = "conversations";
const MESSAGES = "messages";

let opening = null;
let channel = null;

function opened() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("chat", 2);
    request.onupgradeneeded = ({ oldVersion }) => upgrade(request.result, request.transaction, oldVersion);
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
  });
  return opening;
}

// Version 1 stored a conversation's messages in its record, as files do.
function upgrade(database, transaction, oldVersion) {
  if (!oldVersion) database.createObjectStore(CONVERSATIONS, { keyPath: "id" });
  database.createObjectStore(MESSAGES, { keyPath: ["conversation", "key"] });
  transaction.objectStore(CONVERSATIONS).openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    const { messages, ...record } = linked(cursor.value);
    for (const message of messages.values()) transaction.objectStore(MESSAGES).put({ ...message, conversation: record.id });
    cursor.update(record);
    cursor.continue();
  };
}

async function transact(mode, act) {
  const database = await opened();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([CONVERSATIONS, MESSAGES], mode);
    const requests = act(transaction.objectStore(CONVERSATIONS), transaction.objectStore(MESSAGES));
    transaction.oncomplete = () => resolve(requests.map(({ result }) => result));
    transaction.onabort = () => reject(transaction.error);
    // Do not wait for an event, because the page may be about to close.
    transaction.commit();
  });
}

/**
 * Every conversation and every message. Rejects if the browser does not allow storage. From then on,
 * `changed({record, messages})` or `changed({removed: [id]})` is called for changes in other tabs.
 */
export async function all(changed) {
  await opened();
  channel = new BroadcastChannel("chat");
  const reading = transact("readonly", (conversations, messages) => [conversations.getAll(), messages.getAll()]);
  // What another tab stores meanwhile is newer: it is handled after the caller has what was read.
  channel.onmessage = ({ data }) => reading.then(() => setTimeout(changed, 0, data));
  return reading;
}

/** Store a conversation without its messages, and some of its messages. Rejects if storage is full. */
export function put({ messages: _, ...record }, some) {
  const messages = some.map((message) => ({ ...message, conversation: record.id }));
  channel?.postMessage({ record, messages });
  return transact("readwrite", (conversations, store) => [conversations.put(record), ...messages.map((one) => store.put(one))]);
}

/** Remove the conversations with these identifiers. */
export function remove(ids) {
  channel?.postMessage({ removed: ids });
  return transact("readwrite", (conversations, messages) =>
    ids.flatMap((id) => [conversations.delete(id), messages.delete(IDBKeyRange.bound([id], [id, []]))]),
  );
}
