import assert from "node:assert/strict";
import { test } from "node:test";
import { byCell, byKind, cosineText, countText, foldOf, linesOf, measured, type Difference } from "./fold";

function row(name: string, kind: number, layer: number | null, relative: number | null, more: Partial<Difference> = {}): Difference {
  return {
    name, kind, layer, relative, status: relative === 0 ? "equal" : "values", a: "f32[2]", b: "f32[2]", count: 1, max_abs: relative,
    at: null, error: null, cosine: relative === null ? null : 1 - relative, norm_a: 1, norm_b: 1, ...more,
  };
}

const ROWS = [
  row("l.0.e.0", 0, 0, 0.3), row("l.0.e.1", 0, 0, 0.4), row("l.1.e.0", 0, 1, 0),
  row("gone", 1, null, null, { status: "only in a", b: null }), row("head", 2, null, 0.9),
];

test("tensors of a layer and kind are joined by their norms and the smallest cosine", () => {
  const cells = byCell(ROWS);
  assert.equal(cells.get("0/0")!.relative, Math.sqrt((0.09 + 0.16) / 2));
  assert.equal(cells.get("0/0")!.cosine, 0.6);
  assert.equal(measured(cells.get("0/0"), "angle"), 0.4);
  assert.equal(measured(cells.get("0/1"), "relative"), 0);
  assert.ok(Number.isNaN(measured(cells.get("1/"), "relative")));
  assert.ok(cells.get("1/")!.odd);
});

test("the tree has kinds that differ most first, and tensors below those that are open", () => {
  const kinds = byKind(ROWS);
  assert.deepEqual(linesOf(kinds, new Set()).map((line) => "kind" in line && line.kind), [2, 0, 1]);
  const lines = linesOf(kinds, new Set([0, 2]));
  assert.deepEqual(lines.flatMap((line) => ("row" in line ? line.row.name : [])), ["l.0.e.0", "l.0.e.1", "l.1.e.0"]);
  assert.equal(kinds.get(0)!.equal, 1);
});

test("a folded kind says what differs in it", () => {
  const odd = [row("a", 0, 2, null, { status: "shape" }), row("b", 0, 3, null, { status: "only in b" })];
  assert.equal(countText(foldOf(odd)), "1 of another shape; 1 only in B");
  assert.equal(countText(foldOf([...ROWS.slice(0, 3), ...odd])), "2 of 5 differ, most in layer 0; 1 of another shape; 1 only in B");
  assert.equal(countText(foldOf([ROWS[2]!])), "all 1 are equal");
});

test("cosines close to 1 are written as what they lack", () => {
  assert.deepEqual([cosineText(0.25), cosineText(1), cosineText(1 - 2.5e-9), cosineText(null)], ["0.250000", "1", "1−2.5e-9", ""]);
});
