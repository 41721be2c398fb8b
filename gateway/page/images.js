// Reads attached images as data URIs.

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_PIXELS = 1536; // of the longer side; vision models use no more
const SMALL = 400_000; // bytes up to which a file is sent unchanged

/** A file as a data URI; a large image is scaled down. Throws an Error with a message for the user. */
export async function dataUri(file) {
  const name = file.name || "the image";
  if (!TYPES.includes(file.type)) {
    throw new Error(`${name} is ${file.type || "of an unknown type"}: attach a PNG, JPEG, WebP or GIF.`);
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${name} cannot be read as an image.`);
  }
  const scale = MOST_PIXELS / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1 && file.size <= SMALL) return asUri(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * Math.min(1, scale)));
  canvas.height = Math.max(1, Math.round(bitmap.height * Math.min(1, scale)));
  const context = canvas.getContext("2d");
  // JPEG has no transparency: without this, transparent pixels would be black.
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.88);
}

function asUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
