// Reads attached files: an image becomes a data URI, any other file becomes its text.

import { dataUri } from "./images.js";
import { pdf } from "./libraries.js";

const MOST_BYTES = 32 * 2 ** 20;
const MOST_TEXT = 2_000_000; // characters; no context is larger

/**
 * Read a dropped, pasted or chosen file as {image: data URI} or {file: {name, text}}.
 * Throws an Error with a message for the user.
 */
export async function attachment(file) {
  const name = file.name || "the file";
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return { image: await dataUri(file) };
  if (file.size > MOST_BYTES) throw new Error(`${name} has more than ${MOST_BYTES / 2 ** 20} MiB: attach a part of it.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const isPdf = String.fromCharCode(...bytes.subarray(0, 5)) === "%PDF-";
  const text = (isPdf ? await textOfPdf(name, bytes) : textOf(name, bytes)).trim();
  if (!text) throw new Error(isPdf ? `${name} contains no text: attach its pages as images.` : `${name} is empty.`);
  if (text.length > MOST_TEXT) throw new Error(`${name} has ${text.length} characters of text: attach a part of it.`);
  return { file: { name, text } };
}

// UTF-8, or UTF-16 if the file begins with its byte order mark.
function textOf(name, bytes) {
  const utf16 = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.subarray(0, 2).join()];
  try {
    const text = new TextDecoder(utf16 ?? "utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text.replace(/\r\n?/g, "\n");
  } catch {
    // It is not text: throw the error below.
  }
  throw new Error(`${name} is not UTF-8 text, a PDF or an image: it cannot be attached.`);
}

async function textOfPdf(name, data) {
  const { getDocument } = await pdf().catch(() => {
    throw new Error("The page’s PDF reader cannot be loaded. Is the gateway still running?");
  });
  const task = getDocument({ data, verbosity: 0, enableXfa: false });
  try {
    const document = await task.promise;
    const pages = [];
    for (let at = 1; at <= document.numPages; at += 1) {
      const page = await document.getPage(at);
      const { items } = await page.getTextContent();
      pages.push(items.map(({ str, hasEOL }) => str + (hasEOL ? "\n" : "")).join(""));
    }
    return pages.join("\n\n");
  } catch (error) {
    if (error.name === "PasswordException") throw new Error(`${name} is protected by a password: attach a copy without one.`);
    throw new Error(`${name} cannot be read as a PDF.`);
  } finally {
    task.destroy();
  }
}
