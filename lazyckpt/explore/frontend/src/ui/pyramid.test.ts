import assert from "node:assert/strict";
import { test } from "node:test";
import { limitsOf, limitsText, rounded, scaleOf } from "./colourscale";
import { cellText } from "./heatmap";
import { seenOf } from "./seen";
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
  const values = [-1, 0, 2, 3];
  for (const kind of ["linear", "symlog"] as const) {
    const scale = scaleOf(values, kind, "full");
    assert.ok(scale.signed);
    assert.equal(scale.position(0), 0.5);
    for (const value of [-2.9, -1e-4, 0.1, 3]) assert.ok(Math.abs(scale.value(scale.position(value)) - value) < 1e-9);
    assert.equal(scale.position(1e9), 1);
  }
  assert.equal(scaleOf(values, "quantile", "full").position(2), 2 / 3);
  assert.ok(Math.abs(scaleOf([1, 1], "linear", "robust").position(1) - 0.5) < 1e-6);
  assert.deepEqual(limitsOf(limitsText(scaleOf(values, "linear", "robust"))), [-2.985, 2.985]);
  for (const [a, b] of [[-0.0630004882, 0.0630004882], [1.00000123, 1.00000456], [-1e-310, 1e-310], [3e300, 4.4444e300], [0, 1 / 3]] as const) {
    const scale = scaleOf([a, b], "linear", "full");
    const [low, high] = limitsOf(limitsText(scale))!;
    assert.ok(Math.abs(low - a) + Math.abs(high - b) <= 2e-3 * (b - a), `${a} ${b}`);
    assert.deepEqual([rounded(scale, [a, b]).low, rounded(scale, [a, b]).high], [low, high]);
  }
  assert.equal(limitsText(scaleOf([0, 0], "linear", "robust")), undefined); // of a single value
  assert.equal(limitsOf("2,1"), undefined);
  assert.deepEqual(["0", "1.5", "1.2e-5", ""], [0, 1.5, 0.0000123, NaN].map(cellText));
});

test("the cells in view are those that the part meets", () => {
  const tile = (r0: number, rows: number, r1 = r0 + 2 * rows) => ({ key: `${r0}`, r0, r1, c0: 0, c1: 4, rows, cols: 4 });
  const values = (mean: number[]) => ({ mean, min: mean.map((x) => x - 10), max: mean.map((x) => x + 10), exact: true, single: false });
  const upper = { tile: tile(0, 2), values: values([8, 7, 6, 5, 4, 3, 2, 1]) };
  const lower = { tile: tile(4, 2, 7), values: values([NaN, 9, 10, 11, 12, 13, 14, 15]) }; // its first row has one element, the last two
  const seen = (part: Parameters<typeof seenOf>[1], how: Parameters<typeof seenOf>[2] = "mean") => seenOf([upper, lower], part, how);
  assert.deepEqual(seen({ r0: 2, r1: 5, c0: 0, c1: 2 }), { values: Float64Array.of(3, 4, 9), low: -7, high: 19, single: false });
  assert.deepEqual([...seen({ r0: 5, r1: 7, c0: 2.5, c1: 4 }, "absmax").values], [24, 25]);
  assert.deepEqual(seen({ r0: 0, r1: 7, c0: 0, c1: 4 }).values.length, 15);
});
