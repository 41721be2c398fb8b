# The gateway and the backend. A GPU by NVIDIA:
#   docker build --build-arg BUILD_TYPE=cublas --build-arg CUDA_MAJOR_VERSION=12 …
# The image that is not slim has a C compiler, for common/kernels.
FROM python:3.12-bookworm AS build
ARG BUILD_TYPE=cpu
ARG CUDA_MAJOR_VERSION=
WORKDIR /opt/mlx-backend
COPY . .
# The bytecode is never compared with its source, because layers may change the files' dates.
RUN chmod -R a+rX . && ./install.sh --gateway && \
    scripts/python -m compileall -qf -j0 --invalidation-mode unchecked-hash venv/lib backend cli common gateway wire

FROM python:3.12-slim-bookworm
COPY --from=build /opt/mlx-backend /opt/mlx-backend
RUN useradd --uid 1000 --create-home mlx && install -d -o mlx /cache
USER 1000
WORKDIR /home/mlx
ENV MLX_BACKEND_CACHE=/cache/mlx-backend HF_HOME=/cache/huggingface MLX_GATEWAY_HOST=0.0.0.0
VOLUME /cache
EXPOSE 8080
HEALTHCHECK --start-period=30s CMD ["python3", "/opt/mlx-backend/scripts/healthy.py", "/proc/1/cmdline"]
ENTRYPOINT ["/opt/mlx-backend/scripts/python", "-m", "cli"]
CMD ["serve"]
