import assert from "node:assert/strict";
import { test } from "node:test";
import { cellsOf } from "./nearest";

test("cells have the most alike expert, and twins a mark", () => {
  const listed = { layers: ["1", "4", "7"], experts: [0, 1, 2], reads: [1, 1, 1] };
  const one = { layer: "1", experts: [0, 2], nearest: [2, 0], cosines: [0.999, 0.999], exact: true };
  const dead = { layer: "4", experts: [0, 1, 2], nearest: [1, 0, null], cosines: [0.2, 0.2, "NaN" as const], exact: true };
  const found = new Map([["1", one], ["4", dead]]);
  const cells = cellsOf(listed, { found, failed: new Map([["7", "other shapes"]]) });
  assert.deepEqual(cells.map(({ mark }) => mark), ["=", "", "=", "", "", "", "?", "?", "?"]);
  assert.deepEqual(cells.slice(0, 6).map(({ nearest }) => nearest), [2, null, 0, 1, 0, null]);
  assert.deepEqual(cells.map(({ cosine }) => (Number.isNaN(cosine) ? "" : cosine)), [0.999, "", 0.999, 0.2, 0.2, "", "", "", ""]);
});
