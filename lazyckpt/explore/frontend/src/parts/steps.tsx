// Which step of a run is on screen, and with which one it is compared.

import { useExplorer, type Context } from "../context";
import { comparedStep, stepBeside, stepOf } from "../steps";
import { grouped } from "../ui/text";
import "./steps.css";

/** A step as requests name it. A report holds the last one under no name. */
export function askedStep({ api, about }: Context, step: number): string | undefined {
  return step === about.steps[about.steps.length - 1] && !api.live ? undefined : String(step);
}

/** Shows another step. */
export function showStep(context: Context, step: number): void {
  const { route, go } = context;
  const other = route.params["with"] === String(step) ? undefined : route.params["with"]; // nothing is compared with itself
  go({ step: askedStep(context, step), with: other }, undefined, true);
}

/** Whether pages can show a step: a report holds those of the last one. */
export function holdsStep({ api, about, route }: Context, step: number): boolean {
  return step === about.steps[about.steps.length - 1] || api.holds("tree", { state: route.params["state"], step });
}

/** The step that all pages show: a list, and buttons for the steps beside it. */
export function StepSwitch() {
  const context = useExplorer();
  const { steps } = context.about;
  const asked = context.route.params["step"];
  const button = (way: -1 | 1, sign: string, label: string) => {
    const step = stepBeside(steps, asked, way);
    return (
      <button
        type="button"
        class="small"
        aria-label={label}
        title={`${label} (${way < 0 ? "," : "."})`}
        disabled={step === undefined || !holdsStep(context, step)}
        onClick={() => showStep(context, step!)}
      >
        {sign}
      </button>
    );
  };
  return (
    <span role="group" aria-label="step of the run" class="step-switch">
      {button(-1, "‹", "previous step")}
      <select
        aria-label="step"
        title={`the step of the run that all pages show${context.api.live ? "" : "; this report holds some of the steps"}`}
        value={String(stepOf(steps, asked))}
        onChange={(event) => showStep(context, Number(event.currentTarget.value))}
      >
        {steps.map((step) => (
          <option key={step} value={String(step)} disabled={!holdsStep(context, step)}>
            step {grouped(step)}
          </option>
        ))}
      </select>
      {button(1, "›", "next step")}
    </span>
  );
}

/** The parameters of a comparison of two steps. A report holds the default of the second one under no name, too. */
function pairOf(context: Context, step: number, other: number): Record<"step" | "with", string | undefined> {
  const usual = other === comparedStep(context.about.steps, step, undefined);
  return { step: askedStep(context, step), with: usual && !context.api.live ? undefined : String(other) };
}

/** Whether two steps can be compared. */
function holdsPair(context: Context, step: number, other: number): boolean {
  return context.api.holds("compare", { state: context.route.params["state"], ...pairOf(context, step, other) });
}

/** On the page of a comparison: which two steps of the run it compares. */
export function ComparedSteps() {
  const context = useExplorer();
  const { about, route, go } = context;
  const { steps } = about;
  const a = stepOf(steps, route.params["step"]);
  const b = comparedStep(steps, a, route.params["with"]);
  const show = (step: number, other: number) => go(pairOf(context, step, other), undefined, true);
  const select = (label: string, now: number, pair: (step: number) => [number, number]) => (
    <label>
      {label}{" "}
      <select value={String(now)} onChange={(event) => show(...pair(Number(event.currentTarget.value)))}>
        {steps.map((step) => (
          <option key={step} value={String(step)} disabled={!holdsPair(context, ...pair(step))}>
            step {grouped(step)}
          </option>
        ))}
      </select>
    </label>
  );
  return (
    <p class="compare-steps">
      {select("A", a, (step) => [step, b])}
      {select("B", b, (step) => [a, step])}
      <button type="button" class="small" title="compare the other way round" disabled={!holdsPair(context, b, a)} onClick={() => show(b, a)}>
        ⇄ swap
      </button>
    </p>
  );
}

/** On the page of a run: leads to the comparison of the step on screen with another one. */
export function CompareWith({ step }: { step: number }) {
  const context = useExplorer();
  const { about, go } = context;
  const others = about.steps.filter((one) => one !== step && holdsPair(context, step, one));
  if (!others.length) return null;
  return (
    <label>
      compare with
      <select value="" onChange={(event) => event.currentTarget.value && go(pairOf(context, step, Number(event.currentTarget.value)), "compare")}>
        <option value="">step …</option>
        {others.map((one) => (
          <option key={one} value={String(one)}>
            step {grouped(one)}
          </option>
        ))}
      </select>
    </label>
  );
}
