// Where conversations are kept: IndexedDB of this browser, one record for each.

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
    // Without waiting for an event: the page may be about to close.
    transaction.commit();
  });
}

/** Every record. Rejects where the browser keeps nothing. */
export const all = () => transact("readonly", (store) => store.getAll());
/** Write a record over the one of the same `id`. Rejects where there is no room for it. */
export const put = (record) => transact("readwrite", (store) => store.put(record));
export const remove = (id) => transact("readwrite", (store) => store.delete(id));
export const clear = () => transact("readwrite", (store) => store.clear());
