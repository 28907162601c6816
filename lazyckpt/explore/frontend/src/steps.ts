// The steps of a run: which one is on screen, and which ones are beside it.

/** The step that is on screen: that of the link, or the last one. */
export function stepOf(steps: readonly number[], asked: string | undefined): number {
  const step = asked === undefined ? NaN : Number(asked);
  return steps.includes(step) ? step : steps[steps.length - 1]!;
}

/** The step before or after the one on screen; undefined at the end. */
export function stepBeside(steps: readonly number[], asked: string | undefined, way: -1 | 1): number | undefined {
  return steps[steps.indexOf(stepOf(steps, asked)) + way];
}

/** The step that is compared with the one on screen: that of the link, or the step before, or after the first one. */
export function comparedStep(steps: readonly number[], step: number, asked: string | undefined): number {
  const place = steps.indexOf(step);
  const other = asked === undefined ? NaN : Number(asked);
  return steps.includes(other) ? other : (steps[place ? place - 1 : 1] ?? step);
}
