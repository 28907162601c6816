// Builds the application into ../assets, or the folder after --out (one script, one style sheet), or with --tests the
// tests into ./build.
import { build } from "esbuild";
import { readdirSync } from "node:fs";

const common = {
  bundle: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
};

const out = process.argv.indexOf("--out");
const tests = readdirSync("src", { recursive: true }).filter((name) => name.endsWith(".test.ts"));

if (process.argv.includes("--tests")) {
  await build({ ...common, entryPoints: tests.map((name) => `src/${name}`), outdir: "build", platform: "node" });
} else {
  await build({
    ...common,
    entryPoints: { explorer: "src/main.tsx" },
    outdir: out < 0 ? "../assets" : process.argv[out + 1],
    minify: true,
    charset: "ascii",
  });
}
