// A name whose end stays in view where there is no room for all of it: names of tensors and files differ at the end.

import { shownTensor } from "./text";
import "./ending.css";

export function Ending({ text }: { text: string }) {
  return (
    <span class="mono ending" title={shownTensor(text, 4000)}>
      <bdi>{shownTensor(text)}</bdi>
    </span>
  );
}
