import assert from "node:assert/strict";
import { test } from "node:test";
import { besideOf, besideText, choicesOf, exchanged, toggled } from "./states";

const WEIGHT = { state: "weights", of: "" }, FIRST = { state: "exp_avg", of: "" }, STEP = { state: "weights", of: "update" };

test("what stands beside a tensor is a parameter of the link", () => {
  const all = [FIRST, STEP, { state: "a,b:c%", of: "" }];
  assert.equal(besideText(all), "exp_avg,weights:update,a%2Cb%3Ac%25");
  assert.deepEqual(besideOf(besideText(all)), all);
  assert.deepEqual(besideOf(undefined), []);
  assert.equal(besideText([]), undefined);
});

test("states are added and taken away, and change places with the first", () => {
  assert.deepEqual(toggled([FIRST], STEP), [FIRST, STEP]);
  assert.deepEqual(toggled([FIRST, STEP], FIRST), [STEP]);
  assert.deepEqual(exchanged([FIRST, STEP], WEIGHT, FIRST), [WEIGHT, STEP]);
  assert.deepEqual(exchanged([STEP], WEIGHT, FIRST), [STEP]);
});

test("a state of another shape has another window", () => {
  const states = [
    { name: "weights", short: "f32", shape: [4, 3] },
    { name: "exp_avg_sq_row", short: "f32", shape: [4] },
  ];
  const found = choicesOf({ state: "weights", states, shape: [4, 3], derived: [{ of: "update", label: "last step" }] });
  assert.deepEqual(found.map(({ label, fits }) => [label, fits]), [["weights", true], ["exp_avg_sq_row", false], ["last step", true]]);
});
