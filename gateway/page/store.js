// Stores conversations in the browser's IndexedDB, one record for each.

const STORE = "conversations";

let opening = null;

function opened() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("chat", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
  });
  return opening;
}

async function transact(mode, act) {
  const database = await opened();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const request = act(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
    // Do not wait for an event, because the page may be about to close.
    transaction.commit();
  });
}

/** Every record. Rejects if the browser does not allow storage. */
export const all = () => transact("readonly", (store) => store.getAll());
/** Store a record, replacing the one with the same `id`. Rejects if there is no room. */
export const put = (record) => transact("readwrite", (store) => store.put(record));
export const remove = (id) => transact("readwrite", (store) => store.delete(id));
export const clear = () => transact("readwrite", (store) => store.clear());
