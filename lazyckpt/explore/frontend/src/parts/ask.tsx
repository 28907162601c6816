// Figures that read much: they are computed at once if they read little, else when one asks for them.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { useExplorer } from "../context";
import { bytes } from "../ui/text";

const LITTLE = 1 << 30; // bytes that are read without being asked for

/** Shows its children at once if they read little; else a button that says how much they read. */
export function Ask({ reads, what, children }: { reads: number; what: string; children(): ComponentChildren }) {
  const { api } = useExplorer();
  const [wanted, setWanted] = useState(false);
  if (wanted || reads <= LITTLE || !api.live) return <>{children()}</>;
  return (
    <p>
      <button type="button" onClick={() => setWanted(true)}>
        Compute {what}
      </button>{" "}
      <span class="quiet">reads {bytes(reads)}; leaving the page ends it</span>
    </p>
  );
}
