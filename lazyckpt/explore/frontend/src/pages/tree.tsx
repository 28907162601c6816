// The tree of tensors.

import type { Tree } from "../api";
import { useExplorer, useLoaded } from "../context";
import { Failure } from "../ui/failure";
import { shownName } from "../ui/text";

export function TreePage() {
  const { api, route } = useExplorer();
  const { state, step, side } = route.params;
  const { value, error } = useLoaded((signal) => api.json<Tree>("tree", { state, step, side }, signal), [state, step, side]);
  if (error) return <Failure error={error} />;
  if (!value) return <p class="quiet">Reading names …</p>;
  return (
    <ul>
      {value.names.slice(0, 200).map((name) => (
        <li key={name}>{shownName(name)}</li>
      ))}
    </ul>
  );
}
