import assert from "node:assert/strict";
import { test } from "node:test";
import { logTicks, shortNumber, ticks, tickText } from "./axis";
import { toCsv } from "./save";
import { squarified } from "./squares";
import { nextSort, sortedBy, sortOf, sortText } from "./table";
import { bytes, count, counted, shownPlace, shownTensor } from "./text";

test("a treemap's areas are the values' and fill the room", () => {
  const values = [50, 20, 10, 10, 5, 3, 1, 1];
  const rects = squarified(values, { x: 0, y: 0, w: 200, h: 100 });
  rects.forEach(({ w, h }, n) => assert.ok(Math.abs(w * h - values[n]! * 200) < 1e-6));
  for (const { x, y, w, h } of rects) assert.ok(x >= -1e-9 && y >= -1e-9 && x + w <= 200.000001 && y + h <= 100.000001);
});

test("text for spreadsheets is quoted and is no formula", () => {
  assert.equal(toCsv(["a", "b"], [['x,"y"', -1], ["=1+1", null]]), 'a,b\r\n"x,""y""",-1\r\n\'=1+1,\r\n');
  const numbers = ["-0.5", "-inf", "1e-300", "-0.5+2e-9j", "+3"];
  assert.equal(toCsv([], [[...numbers, "-a", "-1+cmd|x"]]), `\r\n${numbers.join(",")},'-a,'-1+cmd|x\r\n`);
});

test("ticks are round numbers inside of the range", () => {
  assert.deepEqual(ticks(0, 10, 5), [0, 2, 4, 6, 8, 10]);
  assert.deepEqual(logTicks(0.5, 2000), [1, 10, 100, 1000]);
  assert.deepEqual(logTicks(0.04, 0.9), [0.05, 0.1, 0.2, 0.5]);
  assert.deepEqual([logTicks(2, 9), logTicks(2.1, 4)], [[2, 5], [2.5, 3, 3.5, 4]]);
  assert.deepEqual(ticks(3, 3), [3]);
  assert.deepEqual(ticks(1e17 - 16, 1e17 + 16), [1e17 - 16]); // ends, although a step is less than what tells numbers apart
  assert.equal(shortNumber(0.00012345), "1.23e-4");
  assert.equal(shortNumber(12.3456), "12.35");
});

test("ticks that are close have the digits that tell them apart", () => {
  assert.deepEqual(tickText([128.51, 128.515, 128.52]), ["128.51", "128.515", "128.52"]);
  assert.deepEqual(tickText([0, 0.5, 1]), ["0", "0.5", "1"]);
  assert.deepEqual(tickText([-2, 0, 2]), ["-2", "0", "2"]);
  assert.equal(new Set(tickText([12345678.1, 12345678.2, 12345678.3])).size, 3);
});

test("sizes and counts change their unit where they are rounded", () => {
  assert.deepEqual([1023, 1024, 10230, 102390, 1048575, 2 ** 40 - 1].map(bytes), ["1023 B", "1.00 KiB", "9.99 KiB", "100 KiB", "1.00 MiB", "1.00 TiB"]);
  assert.deepEqual([999, 999_499, 999_999, 6_738_415_616].map(count), ["999", "999K", "1.00M", "6.74B"]);
});

test("a long path is shown by its last parts", () => {
  assert.equal(shownPlace("/data/run", 20), "/data/run");
  assert.equal(shownPlace("/data/models/checkpoint-100", 20), "…/checkpoint-100");
  assert.equal(shownPlace("/data/models/a/checkpoint", 20), "…/a/checkpoint");
  assert.ok(shownPlace(`/${"x".repeat(90)}`, 20).length <= 23);
});

test("the order of a table is in the link", () => {
  for (const sort of [null, { key: "a:b", down: true }, { key: "", down: false }]) assert.deepEqual(sortOf(sortText(sort)), sort);
  assert.equal(sortOf("bytes"), null);
});

test("rows without a value are last, and equal rows stay in their order", () => {
  const columns = [{ key: "n", title: "n", number: true, value: (row: [string, number | null]) => row[1] }];
  const rows: [string, number | null][] = [["a", 1], ["b", null], ["c", 2], ["d", 1], ["e", NaN], ["f", 2]];
  const names = (sort: { key: string; down: boolean } | null) => sortedBy(rows, columns, sort).map(([name]) => name).join("");
  const first = nextSort(null, columns[0]!), second = nextSort(first, columns[0]!);
  const texts = ["-2", "10", "nan", "9", "-inf"].map((text): [string, string] => [text, text]);
  const found = sortedBy(texts, [{ key: "n", title: "n", number: true, value: ([, text]: [string, string]) => text }], first);
  assert.deepEqual(found.map(([text]) => text), ["10", "9", "-2", "-inf", "nan"]);
  assert.deepEqual([names(first), names(second), names(nextSort(second, columns[0]!))], ["cfadbe", "adcfbe", "abcdef"]);
});

test("numbers and names are as people write them", () => {
  assert.deepEqual([0, 1, 1234].map((n) => counted(n, "row")), ["0 rows", "1 row", "1,234 rows"]);
  assert.deepEqual([shownTensor(""), shownTensor("a\nb")], ["''", "a\\u{a}b"]);
});
