import assert from "node:assert/strict";
import { test } from "node:test";
import { sample, scaleOf } from "./colourscale";
import { cellText } from "./heatmap";
import { around, partOf, partText, rootTile, tilesFor, whole, within, zoomed } from "./pyramid";

const size = { height: 5000, width: 3001 };
const pixels = { height: 500, width: 800 };

test("tiles cover what is seen, once, and only where the whole is too coarse", () => {
  assert.deepEqual(tilesFor(whole(size), pixels, size, 512), []);
  const part = { r0: 1000.5, r1: 1400, c0: 2500, c1: 3001 };
  const tiles = tilesFor(part, pixels, size, 512);
  assert.equal(new Set(tiles.map(({ key }) => key)).size, tiles.length);
  for (let r = 1001; r < 1400; r += 37) {
    for (let c = 2500; c < 3001; c += 29) {
      assert.equal(tiles.filter((t) => r >= t.r0 && r < t.r1 && c >= t.c0 && c < t.c1).length, 1);
    }
  }
  assert.ok(tiles.every((t) => t.rows === t.r1 - t.r0 && t.cols === t.c1 - t.c0)); // one cell for each element
  assert.deepEqual([rootTile(size, 512).rows, rootTile(size, 512).cols], [313, 376]);
});

test("a part stays in the picture, and becomes neither too large nor too small", () => {
  assert.deepEqual(within({ r0: -100, r1: 9000, c0: -5, c1: 20 }, size, pixels), { r0: 0, r1: 5000, c0: 0, c1: 25 });
  const deep = within(zoomed(whole(size), 1e-9, 0.5, 0.5), size, pixels);
  assert.ok(deep.r1 - deep.r0 > 1 && deep.c1 - deep.c0 > 1);
  const near = around(4999, 0, size, pixels);
  assert.ok(near.r1 === 5000 && near.c0 === 0);
  assert.deepEqual(partOf(partText({ r0: 1.25, r1: 3, c0: 0, c1: 7.5 })), { r0: 1.25, r1: 3, c0: 0, c1: 7.5 });
  assert.equal(partOf("1,2,x"), undefined);
});

test("scales map values to colours and back", () => {
  const values = sample([3, -1, NaN, 2, 0, Infinity]);
  assert.deepEqual([...values], [-1, 0, 2, 3]);
  for (const kind of ["linear", "symlog"] as const) {
    const scale = scaleOf(values, kind, "full");
    assert.ok(scale.signed);
    assert.equal(scale.position(0), 0.5);
    for (const value of [-2.9, -1e-4, 0.1, 3]) assert.ok(Math.abs(scale.value(scale.position(value)) - value) < 1e-9);
    assert.equal(scale.position(1e9), 1);
  }
  assert.equal(scaleOf(values, "quantile", "full").position(2), 2 / 3);
  assert.ok(Math.abs(scaleOf(sample([1, 1]), "linear", "robust").position(1) - 0.5) < 1e-6);
  assert.deepEqual(["0", "1.5", "1.2e-5", ""], [0, 1.5, 0.0000123, NaN].map(cellText));
});
