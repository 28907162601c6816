// An error, where its answer would be.

import { ApiError } from "../transport";

export function Failure({ error }: { error: Error }) {
  return (
    <p class="failure" role="alert">
      {error instanceof ApiError ? error.message : String(error)}
    </p>
  );
}
