// Which step of a run is on screen, and with which one it is compared.

import { useExplorer, type Context } from "../context";
import { comparedStep, stepBeside, stepOf } from "../steps";
import { grouped } from "../ui/text";
import "./steps.css";

/** Shows another step. A report holds the last one under no name. */
export function showStep({ api, about, route, go }: Context, step: number): void {
  const last = step === about.steps[about.steps.length - 1];
  const other = route.params["with"] === String(step) ? undefined : route.params["with"]; // nothing is compared with itself
  go({ step: last && !api.live ? undefined : String(step), with: other }, undefined, true);
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
        title={context.api.live ? "the step of the run that all pages show" : "this report shows the last step of the run"}
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

/** On the page of a comparison: which two steps of the run it compares. */
export function ComparedSteps() {
  const { about, route, go } = useExplorer();
  const { steps } = about;
  const a = stepOf(steps, route.params["step"]);
  const b = comparedStep(steps, a, route.params["with"]);
  const select = (label: string, now: number, chosen: (step: string) => void) => (
    <label>
      {label}{" "}
      <select value={String(now)} onChange={(event) => chosen(event.currentTarget.value)}>
        {steps.map((step) => (
          <option key={step} value={String(step)}>
            step {grouped(step)}
          </option>
        ))}
      </select>
    </label>
  );
  return (
    <p class="compare-steps">
      {select("A", a, (step) => go({ step, with: String(b) }, undefined, true))}
      {select("B", b, (step) => go({ step: String(a), with: step }, undefined, true))}
      <button type="button" class="small" title="compare the other way round" onClick={() => go({ step: String(b), with: String(a) }, undefined, true)}>
        ⇄ swap
      </button>
    </p>
  );
}

/** On the page of a run: leads to the comparison of the step on screen with another one. */
export function CompareWith({ step }: { step: number }) {
  const { api, about, go } = useExplorer();
  if (about.steps.length < 2 || !api.live) return null; // a report compares the last two steps
  return (
    <label>
      compare with
      <select value="" onChange={(event) => event.currentTarget.value && go({ step: String(step), with: event.currentTarget.value }, "compare")}>
        <option value="">step …</option>
        {about.steps.map((one) => one !== step && (
          <option key={one} value={String(one)}>
            step {grouped(one)}
          </option>
        ))}
      </select>
    </label>
  );
}
