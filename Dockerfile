# One image for all roles; the command chooses:
#
#   everroll session-server ...      everroll engine ...
#   python -m worker workflows       python -m worker rollout       python -m worker trainer
#
# Agents must be importable where the rollout worker runs: build an image on top of this one with your package, or mount
# a directory and add it to PYTHONPATH.
#
# Not yet built by continuous integration; the compose file beside it was checked with `docker-compose config`.

FROM python:3.11-slim

# For torch's CPU build, name an index that offers it: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    EVERROLL_ROOT=/app \
    OMP_WAIT_POLICY=PASSIVE

WORKDIR /app

# The dependencies change less often than the code: a layer of their own.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir everroll && touch everroll/__init__.py \
    && pip install -c constraints.txt '.[engine,postgres,sessions,trainer,worker]' openai \
    && pip uninstall --yes everroll

COPY . .
RUN pip install --no-deps -e . \
    && useradd --create-home --uid 1000 everroll \
    && install -d -o everroll -g everroll /data

USER everroll
VOLUME /data

CMD ["everroll", "--help"]
