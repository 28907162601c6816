// A name whose end stays in view where there is no room for all of it: names of tensors and files differ at the end.

import { shownName } from "./text";
import "./ending.css";

export function Ending({ text }: { text: string }) {
  return (
    <span class="mono ending" title={shownName(text, 4000)}>
      <bdi>{shownName(text)}</bdi>
    </span>
  );
}
