import assert from "node:assert/strict";
import { test } from "node:test";
import { gridOf, meshText, type Axis, type Ranks } from "./mesh";

const ONE = { tp: 1, pp: 1, dp: 1, ep: 1 };

/** Ranks with these coordinates, each with a file of its own. */
function ranks(mesh: Partial<Record<Axis, number>>, places: Partial<Record<Axis, number>>[]): Ranks {
  const found = places.map((place, n) => ({ rank: { tp: 0, pp: 0, dp: 0, ep: 0, ...place }, tensors: 1, nbytes: n + 1, missing: 0, files: [n] }));
  return { mesh: { ...ONE, ...mesh }, ranks: found, files: [], files_in_all: 0, lost: [], lost_in_all: 0 };
}

test("the outer axes of a mesh are rows, the inner ones columns, in the order of its text", () => {
  const two = ranks({ tp: 2, pp: 2 }, [{}, { tp: 1 }, { pp: 1 }, { pp: 1, tp: 1 }]);
  const grid = gridOf(two, "bytes");
  assert.deepEqual([grid.rows, grid.columns, grid.rowTitle, grid.columnTitle], [["0", "1"], ["0", "1"], "pp", "tp"]);
  assert.deepEqual([...grid.values], [1, 2, 3, 4]);
  assert.equal(meshText(two.mesh), "pp 2 × tp 2");
  const three = gridOf(ranks({ tp: 2, pp: 2, dp: 2 }, [{}, { pp: 1, dp: 1, tp: 1 }]), "bytes");
  assert.deepEqual([three.columns, three.rowTitle, three.columnTitle], [["0.0", "0.1", "1.0", "1.1"], "pp", "dp.tp"]);
  assert.deepEqual([three.values[0], three.values[7]], [1, 2]);
});

test("ranks of one axis are broken into rows", () => {
  const grid = gridOf(ranks({ dp: 1000 }, Array.from({ length: 1000 }, (_, dp) => ({ dp }))), "bytes");
  assert.deepEqual([grid.rows.length, grid.columns.length, grid.rows[1], grid.columns[1], grid.rowTitle], [32, 32, "32", "+1", "dp"]);
  assert.deepEqual([grid.values[999], grid.values[1000]], [1000, NaN]);
  assert.equal(gridOf(ranks({ dp: 32 }, Array.from({ length: 32 }, (_, dp) => ({ dp }))), "bytes").rows.length, 1);
});

test("data-parallel ranks that have no files of their own have no cells, tensor-parallel ones do", () => {
  assert.deepEqual(gridOf(ranks({ dp: 2, ep: 2 }, [{}, { ep: 1 }]), "bytes").columns, ["0", "1"]);
  assert.deepEqual(gridOf(ranks({ dp: 4 }, [{}]), "bytes").cells.length, 1);
  assert.deepEqual([...gridOf(ranks({ tp: 2 }, [{ tp: 1 }]), "bytes").values], [NaN, 1]);
});
