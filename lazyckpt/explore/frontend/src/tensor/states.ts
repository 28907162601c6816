// What a tensor's page shows side by side: the tensor in several states, and what is derived from it.

import { percentDecoded, percentEncoded } from "../percent";
import type { Facts } from "./cards";

/** A tensor in a state, or what is derived from it there. */
export interface Shown {
  state: string;
  /** "" for the tensor itself. */
  of: string;
}

export interface Choice extends Shown {
  label: string;
  /** Whether it has the shape of the tensor on screen, so that both have the same window. */
  fits: boolean;
}

/** All that can be shown of a tensor, in the order of its buttons. */
export function choicesOf(facts: Pick<Facts, "state" | "states" | "shape" | "derived">): Choice[] {
  const same = (shape: number[]) => shape.length === facts.shape.length && shape.every((length, n) => length === facts.shape[n]);
  return [
    ...facts.states.map(({ name, shape }) => ({ state: name, of: "", label: name, fits: same(shape) })),
    ...facts.derived.map(({ of, label }) => ({ state: facts.state, of, label, fits: true })),
  ];
}

/** As a word of a link: names of states have neither a comma nor a colon there. */
export function besideKey({ state, of }: Shown): string {
  return of ? `${percentEncoded(state)}:${of}` : percentEncoded(state);
}

/** The parameter of a link, read: what stands beside the tensor. */
export function besideOf(text: string | undefined): Shown[] {
  const words = (text ?? "").split(",").filter(Boolean);
  return words.map((word) => {
    const [state = "", of = ""] = word.split(":");
    return { state: percentDecoded(state), of };
  });
}

export function besideText(all: Shown[]): string | undefined {
  return all.length ? all.map(besideKey).join(",") : undefined;
}

const equal = (a: Shown, b: Shown) => besideKey(a) === besideKey(b);

/** With one more, or without it. */
export function toggled(all: Shown[], one: Shown): Shown[] {
  return all.some((other) => equal(other, one)) ? all.filter((other) => !equal(other, one)) : [...all, one];
}

/** What stands beside `next` when it takes the first place from `now`: they change places. */
export function exchanged(all: Shown[], now: Shown, next: Shown): Shown[] {
  return all.map((one) => (equal(one, next) ? now : one));
}
