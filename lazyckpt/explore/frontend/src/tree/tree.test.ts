import assert from "node:assert/strict";
import { test } from "node:test";
import { globOf, Names } from "./names";
import { natural, Tree } from "./nodes";
import { openAtFirst, openTo, visibleRows } from "./rows";

function namesOf(list: string[]): Names {
  const sorted = [...list].sort();
  return new Names(sorted.map((name) => `${name}\n`).join(""), sorted.length);
}

function layers(count: number, inside = ["attn.q.weight", "attn.k.weight", "mlp.up.weight"]): string[] {
  return Array.from({ length: count }, (_, n) => inside.map((name) => `model.layers.${n}.${name}`)).flat();
}

test("names are found by words, whatever the case, and by globs", () => {
  const names = namesOf(["model.embed.weight", "model.layers.0.Attn.q.weight", "model.layers.0.mlp.up.weight", "norm.weight"]);
  const found = (query: string) => Array.from(names.search(query)!, (n) => names.name(n));
  assert.deepEqual(found("attn WEIGHT"), ["model.layers.0.Attn.q.weight"]);
  assert.deepEqual(found("*.up.*"), ["model.layers.0.mlp.up.weight"]);
  assert.deepEqual(found("model.?????.weight"), ["model.embed.weight"]);
  assert.deepEqual(found("model nothing"), []);
  assert.equal(names.search("  "), null);
  assert.equal(names.find("norm.weight"), 3);
  assert.equal(names.find("norm"), -1);
});

test("a search finds what looking at each name finds", () => {
  let seed = 7;
  const random = (n: number) => (seed = (seed * 1103515245 + 12345) & 0x7fffffff) % n;
  const list = [...new Set(Array.from({ length: 3000 }, () => Array.from({ length: 1 + random(4) }, () => ["a", "b", "ab", "q_proj", "10", "2"][random(6)]).join(".")))];
  const all = [list, list.map((name) => name.replaceAll("b", "B")), list.map((name) => name.replaceAll("2", "\u00e9\ud83d\ude00"))];
  for (const some of all) {
    const names = namesOf(some);
    for (const query of ["a", "ab", "b.b.b", "q_proj 10", "*", "*.ab", "a*2", "ab.*", "*a*", "*b.a*", "**2", "a*a*b", "[ab].*", "[!a].2", "b.b b", "\u00e9"]) {
      const tests = query.split(" ").map((word) => (/[*?[]/.test(word) ? (s: string) => globOf(word).test.test(s) : (s: string) => s.includes(word)));
      const wanted = [...some].sort().filter((name) => tests.every((one) => one(name.toLowerCase())));
      assert.deepEqual(Array.from(names.search(query)!, (n) => names.name(n)), wanted, query);
    }
  }
});

test("a glob is no expression", () => {
  assert.ok(globOf("a+(b)").test.test("a+(b)"));
  assert.ok(!globOf("[z-a]").test.test("z"));
  assert.ok(globOf("a[").test.test("a["));
});

test("numbers are in their natural order", () => {
  assert.deepEqual(["10", "9", "b", "a"].sort(natural), ["9", "10", "a", "b"]);
  assert.deepEqual(["w10", "w9"].sort(natural), ["w9", "w10"]);
});

test("layers that are alike are one row, and others say how they differ", () => {
  const list = [...layers(6), "model.norm.weight", "model.layers.2.extra.bias"];
  const names = namesOf(list);
  const tree = new Tree(names, new Int32Array(list.length));
  const open = new Set(["model", "model.layers"]);
  const rows = visibleRows(tree, open, new Set());
  assert.deepEqual(
    rows.map(({ label, depth }) => [label, depth]),
    [["model", 0], ["layers", 1], ["0", 2], ["1", 2], ["2", 2], ["3", 2], ["4", 2], ["5", 2], ["norm.weight", 1]],
  );
  assert.equal(rows[4]!.differs, "has extra.bias");
  const more = namesOf([...layers(12), "model.layers.0.extra.bias"]);
  const folded = visibleRows(new Tree(more, new Int32Array(37)), new Set(["model.layers"]), new Set());
  assert.deepEqual(folded.map(({ label }) => label), ["model.layers", "0", "1–11"]);
  assert.equal(folded[2]!.copies.length, 11);
});

test("a folded row stands for the same tensor of every layer", () => {
  const list = [...layers(12), ...layers(3).map((name) => name.replace("model", "other"))];
  const names = namesOf(list);
  const tree = new Tree(names, new Int32Array(list.length));
  const rows = visibleRows(tree, new Set(["model.layers", "model.layers.[0–11]", "model.layers.[0–11].attn"]), new Set());
  const row = rows.find(({ label }) => label === "q.weight")!;
  const stood = row.copies.map((copy) => names.name(tree.at(row.node.leaf + copy)));
  assert.deepEqual(stood, Array.from({ length: 12 }, (_, n) => `model.layers.${n}.attn.q.weight`));
});

test("a difference of dtype or shape alone unfolds a layer", () => {
  const list = layers(8);
  const names = namesOf(list);
  const kinds = new Int32Array(list.length);
  kinds[names.find("model.layers.5.mlp.up.weight")] = 1;
  const tree = new Tree(names, kinds, null, (kind) => ["f32", "bf16"][kind]!);
  const rows = visibleRows(tree, new Set(["model.layers"]), new Set());
  assert.deepEqual(rows.map(({ label }) => label), ["model.layers", "0–4", "5", "6", "7"]);
  assert.equal(rows[2]!.differs, "mlp.up.weight is bf16, not f32");
});

test("nested folds stand for every expert of every layer", () => {
  const list = Array.from({ length: 5 }, (_, n) => Array.from({ length: 12 }, (_, e) => `h.${n}.experts.${e}.w`)).flat();
  const names = namesOf(list);
  const tree = new Tree(names, new Int32Array(list.length));
  const open = openAtFirst(tree);
  const row = visibleRows(tree, open, new Set()).find(({ leaf }) => leaf)!;
  const stood = new Set(row.copies.map((copy) => names.name(tree.at(row.node.leaf + copy))));
  assert.equal(row.series, 5);
  assert.deepEqual([...stood].sort(), [...list].sort());
});

test("a name that is a tensor and a prefix has two rows", () => {
  const tree = new Tree(namesOf(["a", "a-b", "a.c"]), new Int32Array(3));
  const rows = visibleRows(tree, new Set(["a."]), new Set());
  assert.deepEqual(rows.map(({ key, leaf }) => [key, leaf]), [["a", true], ["a.", false], ["a..c", true], ["a-b", true]]);
});

test("the way to any name opens its row", () => {
  const list = [...layers(12), "model.layers.3.extra", "model.norm", "lone"];
  const names = namesOf(list);
  for (const tree of [new Tree(names, new Int32Array(list.length)), new Tree(names, new Int32Array(list.length), names.search("model"))]) {
    for (let place = 0; place < tree.count; place += 1) {
      const rows = visibleRows(tree, new Set(openTo(tree, tree.at(place), new Set())), new Set());
      assert.ok(rows.some((row) => row.leaf && row.copies.some((copy) => row.node.leaf + copy === place)), names.name(tree.at(place)));
    }
  }
});
