// Unpacks the browser of @sparticuz/chromium, with its libraries and fonts, into chromium/.
import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { brotliDecompressSync } from "node:zlib";

const here = fileURLToPath(new URL(".", import.meta.url));
const read = (name) =>
  brotliDecompressSync(readFileSync(`${here}node_modules/@sparticuz/chromium/bin/${name}.br`));
mkdirSync(`${here}chromium`);
writeFileSync(`${here}chromium/chromium`, read("chromium"), { mode: 0o755 });
for (const name of ["al2023.tar", "fonts.tar"]) {
  execFileSync("tar", ["-x", "-C", `${here}chromium`], { input: read(name) });
}
// The package's own names the folders of a service that it is made for.
writeFileSync(
  `${here}chromium/fonts.conf`,
  `<fontconfig><dir>/usr/share/fonts</dir><dir>${here}chromium/fonts</dir></fontconfig>`,
);
