import assert from "node:assert/strict";
import { test } from "node:test";
import { comparedStep, stepBeside, stepOf } from "./steps";

const STEPS = [0, 10, 40];

test("the step on screen is that of the link, else the last one", () => {
  assert.deepEqual([undefined, "10", "0", "11", "x"].map((asked) => stepOf(STEPS, asked)), [40, 10, 0, 40, 40]);
});

test("the steps beside it end with the run", () => {
  assert.deepEqual([undefined, "10", "0"].map((asked) => stepBeside(STEPS, asked, -1)), [10, 0, undefined]);
  assert.deepEqual([undefined, "10", "0"].map((asked) => stepBeside(STEPS, asked, 1)), [undefined, 40, 10]);
});

test("a step is compared with the one before it, and the first with the second", () => {
  assert.deepEqual(STEPS.map((step) => comparedStep(STEPS, step, undefined)), [10, 0, 10]);
  assert.equal(comparedStep(STEPS, 40, "0"), 0);
  assert.equal(comparedStep(STEPS, 40, "7"), 10);
});
